"""Workers that share a card: their messages go through main memory, and one device's losses come out."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import pytest
import torch

from gpp import SGD, Flush
from gpp.program.waits import EVERYONE
from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.job import Job
from gpp.runtime.transport.cards import StagedTransport
from gpp.runtime.transport.channels import DONE, AbstractTransport, Channel, Handle, Mark, Receive
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import RingSize
from tests.support import asynchronous, inprocess, on_cards
from tests.support.cards.card import ModelCard
from tests.support.cards.faults import EarlyReuse, Race
from tests.support.cards.machine import Machine

Queues = dict[Channel, deque[torch.Tensor]]
Terms = dict[tuple[int, int], dict[int, torch.Tensor]]


@final
class MainMemory(AbstractTransport):
    """Messages in main memory between hosts that take turns."""

    def __init__(self, card: ModelCard, device: int, queues: Queues, terms: Terms, members: Mapping[int, int]) -> None:
        self._card, self._device, self._queues, self._terms, self._members = card, device, queues, terms, members
        self._sums: dict[int, int] = defaultdict(int)

    def prepare(self, sizes: Mapping[Channel, RingSize]) -> None:
        return None

    def post(self, channel: Channel, form: Form) -> Receive:
        source, buffer = self._queues[channel], form.empty()

        def arrived() -> torch.Tensor:
            while not source:
                self._card.host.pause()
            return buffer.copy_(source.popleft().view_as(buffer))

        return arrived

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        self._queues[channel].append(tensor.clone())

    def reduce(self, group: int, tensor: torch.Tensor) -> Handle:
        self._sums[group] += 1
        terms = self._terms.setdefault((group, self._sums[group]), {})
        terms[self._device] = tensor.clone()
        while len(terms) < self._members[group]:
            self._card.host.pause()
        tensor.copy_(torch.stack([terms[device] for device in sorted(terms)]).sum(0))
        return DONE

    def sum_members(self, devices: tuple[int, ...], tensor: torch.Tensor) -> Handle:
        raise AssertionError("no stage is split")

    def finished(self) -> Mark:
        raise AssertionError("the card has a clock of its own")

    def flush(self, limit: int = 0) -> None:
        return None


def job_of() -> tuple[Job, dict[str, torch.Tensor]]:
    """A job for gloo: its receives stand two passes ahead."""
    optimizer = SGD(lr=0.1, momentum=0.9, clip_norm=0.2)
    job, weights = asynchronous.make_job("Fork", Flush(), optimizer, replicas=(1, 2, 1, 2), sizes=2, steps=3)
    return replace(job, settings=replace(job.settings, device_kind="cuda")), weights


def shared(queues: Queues, terms: Terms, job: Job, card: AbstractCard, device: int) -> AbstractTransport:
    assert isinstance(card, ModelCard)
    from gpp.program.program import reduce_groups

    groups = reduce_groups(job.plan, job.graph)
    members = {EVERYONE: job.plan.num_devices} | {g: len(group.devices) for g, group in enumerate(groups)}
    return StagedTransport(card, MainMemory(card, device, queues, terms, members))


@pytest.mark.parametrize("policy", ["random", "eager"])  # `lazy` would let hosts that wait in turn go on for ever
def test_workers_of_one_card_equal_one_device(policy: str, tmp_path: Path) -> None:
    job, weights = job_of()
    machine = Machine(policy=policy)  # pyright: ignore[reportArgumentType]
    out = on_cards.train(job, tmp_path, weights, machine, transport=partial(shared, defaultdict(deque), {}), proved=False)
    expected, params = inprocess.reference_of(job, weights)
    assert out.losses == pytest.approx(expected, abs=1e-12)
    for name, tensor in params.items():
        torch.testing.assert_close(out.weights[name], tensor, rtol=0, atol=1e-11)


def test_main_memory_that_is_freed_under_a_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: StagedTransport, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host, non_blocking=True)
        host.zero_()

    monkeypatch.setattr(StagedTransport, "upload", forgets)
    job, weights = job_of()
    with pytest.raises((EarlyReuse, Race)):
        on_cards.train(job, tmp_path, weights, transport=partial(shared, defaultdict(deque), {}), proved=False)
