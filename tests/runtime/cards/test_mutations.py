"""Defects put into the path of the cards on purpose: the stream model finds each, in every order of execution."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import SGD, Flush, Stash
from gpp.errors import MalformedProgram
from gpp.program.cards import check_cards
from gpp.program.program import reduce_groups
from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.job import Job
from gpp.runtime.transport import cards as transport_of_cards
from gpp.runtime.transport.cards import CardTransport
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker import rows
from gpp.runtime.worker.gradients import Gradients
from tests.support import asynchronous, on_cards
from tests.support.cards.faults import Deadlock, EarlyReuse, Mismatch, Race
from tests.support.cards.machine import Machine, Policy, Rule
from tests.support.long import thinned

WAYS: list[tuple[Rule, Policy]] = [("streams", "lazy"), ("one_queue", "random")]


def job_of(**settings: Any) -> tuple[Job, dict[str, torch.Tensor]]:
    """A fork and a join with replicas, clipped by the norm of all stages."""
    optimizer = SGD(lr=0.1, momentum=0.9, clip_norm=0.2)
    settings = {"steps": 3, "device_kind": "cuda"} | settings
    return asynchronous.make_job("Fork", Flush(), optimizer, replicas=(1, 2, 1, 2), sizes=2, **settings)


def run(folder: Path, rule: Rule, policy: Policy, **changes: Any) -> on_cards.Trained:
    job, weights = job_of()
    return on_cards.train(job, folder, weights, Machine(rule=rule, policy=policy), **changes)


@pytest.mark.parametrize(("rule", "policy"), thinned(WAYS))
def test_a_device_wide_wait_is_found(rule: Rule, policy: Policy, tmp_path: Path) -> None:
    try:
        found = run(tmp_path, rule, policy, change=on_cards.wait_for_the_device).machine.findings
    except Deadlock:
        return
    assert any("device-wide wait" in words for words in found)


def message_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def keeps(self: transport_of_cards._CardArrival) -> torch.Tensor:
        self._card.keep(self._buffer)
        return self._buffer

    patch.setattr(transport_of_cards._CardArrival, "wait", keeps)


def sums_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gradients, "settle", lambda self: self._sums.clear())


def sent_tensor_freed_early(patch: pytest.MonkeyPatch) -> None:
    send = CardTransport.send

    def forgets(self: CardTransport, channel: Any, tensor: torch.Tensor) -> None:
        send(self, channel, tensor)
        self._pending.clear()

    patch.setattr(CardTransport, "send", forgets)


def buffer_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The lost `record_stream`: the next receive may be given the memory while a pass still reads it."""

    def waits(self: transport_of_cards._CardArrival) -> torch.Tensor:
        self._arrived.wait()
        return self._buffer

    patch.setattr(transport_of_cards._CardArrival, "wait", waits)


def rows_not_kept(patch: pytest.MonkeyPatch) -> None:
    def receive(self: rows.Rows, sent: rows._RowsOnTheWay) -> dict[str, torch.Tensor]:
        sent.done.wait()
        out, sent.rows = sent.rows, {}
        return out

    patch.setattr(rows.Rows, "_receive", receive)


def pinned_memory_freed(patch: pytest.MonkeyPatch) -> None:
    send = rows.Rows._send

    def forgets(self: rows.Rows, found: dict[str, torch.Tensor]) -> rows._RowsOnTheWay:
        sent = send(self, found)
        self._copied.clear()
        for tensor in sent.pinned.values():
            tensor.zero_()
        return sent

    patch.setattr(rows.Rows, "_send", forgets)


@pytest.mark.parametrize(("rule", "policy"), thinned(WAYS))
@pytest.mark.parametrize(
    ("defect", "fault"),
    [
        (message_not_awaited, Race),
        (sums_not_awaited, Race),
        (sent_tensor_freed_early, (EarlyReuse, Race)),
        (buffer_not_kept, (EarlyReuse, Race)),
        (rows_not_kept, (EarlyReuse, Race)),
        (pinned_memory_freed, (EarlyReuse, Race)),
    ],
)
def test_a_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None],
    fault: Any,
    rule: Rule,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defect(monkeypatch)
    job, weights = job_of()
    if defect is rows_not_kept:
        # A step that drains ends with a wait, after which nothing reads its rows.
        job, weights = asynchronous.make_job("Fork", Stash(), SGD(lr=0.1, momentum=0.9), sizes=2, steps=6, device_kind="cuda")
    with pytest.raises(fault):
        on_cards.train(job, tmp_path, weights, Machine(rule=rule, policy=policy))


def test_communicators_made_in_another_order_are_found(tmp_path: Path) -> None:
    def turned(job: Job, card: AbstractCard, device: int) -> AbstractTransport:
        if device != 2:
            return on_cards.card_transport(job, card, device)
        with pytest.MonkeyPatch.context() as patch:
            made = on_cards.communicators
            patch.setattr(on_cards, "communicators", lambda *words, **more: made(*words, **more)[::-1])
            return on_cards.card_transport(job, card, device)

    for rule, policy in WAYS:
        with pytest.raises((Mismatch, Deadlock)):
            run(tmp_path, rule, policy, transport=turned)


def test_receives_in_another_order_are_found(tmp_path: Path) -> None:
    """The order of gloo, two passes ahead, on the cards' own path: the strictest card deadlocks, and the proof says so."""
    job, weights = job_of(device_kind="cpu")
    assert job.program.actions != job_of()[0].program.actions
    job = replace(job, settings=replace(job.settings, backend="nccl", device_kind="cuda"))
    with pytest.raises(MalformedProgram):
        check_cards(job.program, job.plan, reduce_groups(job.plan, job.graph))
    with pytest.raises((Deadlock, Mismatch)):
        on_cards.train(job, tmp_path, weights, Machine(rule="one_queue"), proved=False)
