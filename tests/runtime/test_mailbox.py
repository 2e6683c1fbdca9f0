"""A mailbox joins the sample ranges that it receives and cuts out those that it sends."""

import random

import pytest
import torch

from gpp.capture.stage import BoundaryTensor
from gpp.runtime.worker.mailbox import Handover, Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from tests.support.fake_transport import FakeNetwork, FakeTransport

SAMPLES = 12


def ranges(devices: list[int], rng: random.Random) -> list[tuple[int, int, int]]:
    """(device, lo, hi): the samples that each device holds."""
    cuts = [0, *sorted(rng.sample(range(1, SAMPLES), len(devices) - 1)), SAMPLES]
    return [(device, lo, hi) for device, lo, hi in zip(devices, cuts, cuts[1:], strict=False)]


def spec(batch_dim: int, dtype: torch.dtype) -> BoundaryTensor:
    return BoundaryTensor(shape=(2, 3), batch_dim=batch_dim, dtype=dtype, differentiable=True)


@pytest.mark.parametrize("direction", ["F", "B"])
@pytest.mark.parametrize("seed", range(12))
def test_every_receiver_gets_its_samples_of_every_sender(direction: str, seed: int) -> None:
    rng = random.Random(seed)
    num = rng.choice([0, 1, 2, 3])
    specs = tuple(spec(rng.choice([0, 1, 2]), rng.choice([torch.float32, torch.float64])) for _ in range(num))
    layout = Layout(tuple(f"t{i}" for i in range(num)), specs)
    whole = {name: torch.randn(SAMPLES, 2, 3, dtype=s.dtype) for name, s in zip(layout.names, specs, strict=True)}
    # Device 1 holds both stages, so that some samples are handed over and others travel.
    senders, receivers = ranges([0, 1], rng), ranges([1, 2, 3][: rng.choice([2, 3])], rng)
    upstream = Boundary(incoming={}, outgoing={7: layout}, returning_in={7: layout}, returning_out={})
    downstream = Boundary(incoming={5: layout}, outgoing={}, returning_in={}, returning_out={5: layout})
    source, target = (5, 7) if direction == "F" else (7, 5)
    network = FakeNetwork((), 4, timeout_s=5.0)
    handovers: dict[int, Handover] = {device: {} for device in range(4)}

    def mailbox(stage: int, device: int) -> Mailbox:
        return Mailbox(
            stage=stage,
            device_id=device,
            transport=FakeTransport(network, device),
            device=torch.device("cpu"),
            boundary=upstream if stage == 5 else downstream,
            handover=handovers[device],
        )

    inbox = {device: mailbox(target, device) for device, _, _ in receivers}
    for b, lo, hi in receivers:
        for a, first, end in rng.sample(senders, len(senders)):
            if max(lo, first) < min(hi, end):
                inbox[b].post(direction, 4, source, a, max(lo, first), min(hi, end))
    for a, first, end in senders:
        outbox = mailbox(source, a)
        outbox.put(
            direction, 4, first, {n: whole[n][first:end].movedim(0, s.batch_dim) for n, s in zip(layout.names, specs, strict=True)}
        )
        parts = [(b, max(lo, first), min(hi, end)) for b, lo, hi in receivers if max(lo, first) < min(hi, end)]
        for i, (b, lo, hi) in enumerate(parts):
            sent = outbox.send(direction, 4, target, b, lo, hi, i == len(parts) - 1)
            assert sent == (0 if a == b else layout.num_bytes(hi - lo))
        with pytest.raises(KeyError):
            outbox.send(direction, 4, target, 3 - a, first, end, last=True)
    for b, lo, hi in receivers:
        inbox[b].arrive(direction, 4)
        found = inbox[b].take(direction, 4)
        assert [name for name, _ in found] == list(layout.names)
        for (name, tensor), s in zip(found, specs, strict=True):
            assert torch.equal(tensor.movedim(s.batch_dim, 0), whole[name][lo:hi])
        assert not inbox[b].take(direction, 4)
        assert not handovers[b]
