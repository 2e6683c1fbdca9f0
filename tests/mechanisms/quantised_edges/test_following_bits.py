"""Bits that follow a link, through the mailboxes of both of its ends."""

import random

import pytest
import torch

from gpp.capture.stage import BoundaryTensor
from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.sizes import useful_bits
from gpp.mechanisms.quantised_edges.worker import CodedLayout, FollowingBits
from gpp.runtime.transport.channels import Channel
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from tests.support.fake_transport import FakeNetwork, FakeTransport


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
    lay = Layout(
        ("x", "n"),
        (
            BoundaryTensor(shape=(500,), batch_dim=0, dtype=torch.float32, differentiable=True),
            BoundaryTensor(shape=(), batch_dim=0, dtype=torch.int64, differentiable=False),
        ),
    )
    tensors = [
        Tensor(name="x", producer=0, consumers=(1,), bytes_per_sample=2000.0),
        Tensor(name="n", producer=0, consumers=(1,), bytes_per_sample=8.0, values="other"),
    ]
    layouts = {bits: CodedLayout.of(lay, tensors, bits, clip=False) for bits in (0, *useful_bits())}
    first = rng.choice([*layouts])
    # The link is fast, then at the limit, then slow, each for a third, with some noise.
    trace = [rng.uniform(0.9, 1.1) * rate for rate in rng.sample([1e6, 12e4, 6e4, 1e4], 3) for _ in range(count // 3)]
    network = FakeNetwork((), 2, timeout_s=5.0)
    ends = [FakeTransport(network, device) for device in (0, 1)]
    link, cpu = Link(trace, ends[0]), torch.device("cpu")
    codings = [
        FollowingBits(
            layouts=layouts, first=first, ahead=buffers + 1, window=window, sample_s={(0, 1): sample_s}, device=cpu, transport=end
        )
        for end in ends
    ]
    out = Boundary(incoming={}, outgoing={1: lay}, returning_in={}, returning_out={}, coded={1: codings[0]})
    into = Boundary(incoming={0: lay}, outgoing={}, returning_in={}, returning_out={}, coded={0: codings[1]})
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
        bits = next(bits for bits in layouts if codings[0].num_bytes(bits, samples) == sent[-1])
        coded = layouts[bits].quantisers[0] if bits else None
        assert torch.equal(found["n"], given["n"])
        assert torch.equal(found["x"], coded.decode(coded.encode(given["x"])) if coded else given["x"])
    # By the rule alone: what the last whole window before message k - ahead has measured decides over message k.
    sizes = {bits or 32: 8 + (2000 if not bits else 8 + 4 * -(-500 // (32 // bits))) for bits in layouts}
    for k, num_bytes in enumerate(sent):
        done = max(k - buffers - 1, 0) // window * window
        seen = slice(done - window, done)
        wanted = choose(sum(sent[seen]) / sum(link.took[seen]), sample_s, sizes) if done else first
        assert num_bytes == codings[0].num_bytes(wanted % 32, samples), k
