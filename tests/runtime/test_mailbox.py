"""A mailbox joins the sample ranges that it receives and cuts out those that it sends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from gpp.capture.stage import BoundaryTensor
from gpp.cost.edges import useful_bits
from gpp.graph.op_graph import Tensor
from gpp.runtime.transport.channels import Channel
from gpp.runtime.worker.mailbox import Handover, Mailbox
from gpp.runtime.worker.messages import Boundary, Changing, Layout, quantised
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


class Link:
    """A link whose bandwidth follows a trace, message by message, as its sender measures it."""

    def __init__(self, bytes_per_s: list[float], transport: FakeTransport) -> None:
        self.bytes_per_s, self.took, self._unseen, self._send = (
            bytes_per_s,
            list[float](),
            list[tuple[int, float]](),
            transport.send,
        )
        transport.send, transport.timed = self.send, self.timed  # type: ignore[method-assign]

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        self.took.append(tensor.nbytes / self.bytes_per_s[len(self.took)])
        self._unseen.append((tensor.nbytes, self.took[-1]))
        self._send(channel, tensor)

    def timed(self, channel: Channel) -> list[tuple[int, float]]:
        seen, self._unseen = self._unseen, []
        return seen


def choose(rate: float, sample_s: float, sizes: dict[int, int]) -> int:
    """The most bits with which a sample takes no longer, by trying all; 32 stands for values as they are."""
    keep = [bits for bits, size in sizes.items() if size <= rate * sample_s]
    return max(keep, default=2)


@pytest.mark.parametrize("seed", range(6))
def test_bits_follow_the_link_and_both_ends_agree(seed: int) -> None:
    rng = random.Random(seed)
    samples, count, buffers, window, sample_s = 3, 60, rng.choice([1, 2, 4]), rng.choice([1, 3, 8]), 0.01
    specs = (spec(0, torch.float32), BoundaryTensor(shape=(), batch_dim=0, dtype=torch.int64, differentiable=False))
    lay = Layout(("x", "n"), (replace(specs[0], shape=(500,)), specs[1]))
    tensors = [
        Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=2000.0),
        Tensor(name="n", producer=0, consumers=(1,), bytes_per_sample=8.0, values="other"),
    ]
    layouts = {0: lay} | {bits: quantised(lay, tensors, bits, clip=False) for bits in useful_bits()}
    first = rng.choice([*layouts])
    changing = Changing(layouts, first=first, ahead=buffers + 1, window=window, sample_s={(0, 1): sample_s})
    # The link is fast, then at the limit, then slow, each for a third, with some noise.
    trace = [rng.uniform(0.9, 1.1) * rate for rate in rng.sample([1e6, 12e4, 6e4, 1e4], 3) for _ in range(count // 3)]
    network = FakeNetwork((), 2, timeout_s=5.0)
    ends = [FakeTransport(network, device) for device in (0, 1)]
    link, cpu = Link(trace, ends[0]), torch.device("cpu")
    out = Boundary(incoming={}, outgoing={1: lay}, returning_in={}, returning_out={}, changing={1: changing})
    into = Boundary(incoming={0: lay}, outgoing={}, returning_in={}, returning_out={}, changing={0: changing})
    sender, reader = (
        Mailbox(stage=s, device_id=s, transport=ends[s], device=cpu, boundary=(out, into)[s], handover={}) for s in (0, 1)
    )
    for microbatch in range(buffers):
        reader.post("F", microbatch, 0, 0, 0, samples)
    sent = []
    for microbatch in range(count):
        if microbatch + buffers < count:
            reader.post("F", microbatch + buffers, 0, 0, 0, samples)
        given = {"x": torch.randn(samples, 500, generator=torch.Generator().manual_seed(microbatch)), "n": torch.arange(samples)}
        sender.put("F", microbatch, 0, dict(given))
        sent.append(sender.send("F", microbatch, 1, 1, 0, samples, True))
        reader.arrive("F", microbatch)
        found = dict(reader.take("F", microbatch))
        bits = next(bits for bits in layouts if changing.num_bytes(bits, samples) == sent[-1])
        coded = layouts[bits].quantisers[0] if bits else None
        assert torch.equal(found["n"], given["n"])
        assert torch.equal(found["x"], coded.decode(coded.encode(given["x"])) if coded else given["x"])
    # By the rule alone: what the last whole window before message k - ahead has measured decides over message k.
    sizes = {bits or 32: 8 + (2000 if not bits else 8 + 4 * -(-500 // (32 // bits))) for bits in layouts}
    for k, num_bytes in enumerate(sent):
        done = max(k - buffers - 1, 0) // window * window
        seen = slice(done - window, done)
        wanted = choose(sum(sent[seen]) / sum(link.took[seen]), sample_s, sizes) if done else first
        assert num_bytes == changing.num_bytes(wanted % 32, samples), k
