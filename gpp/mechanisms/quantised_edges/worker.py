"""Messages whose values are coded, on the devices that send and read them.

Bits that follow the speed of a link: what `strategy.edges.bits=auto` does while messages are sent.

The sender measures its link over a window of messages, and then takes the most bits with which the link keeps up. A receiver must
know the form of a message before it comes, and posts some of them ahead, so each message says how many bits a later one has: both
ends count `ahead` messages from the announcement to the change. Nothing here looks at a clock: the same times give the same bits.

Values of a message as few bits: levels between a sample's least and its largest value, several in a word.

Shapes, for a tensor x of N samples with D values each, at q bits: V = floor(32/q) values in a word, W = ceil(D/V) words.

    encode(x)  [N, H + W] int32: the least value, the distance of two levels (H words), then the levels
    decode     [N, D]: least + level x distance, so that no value is off by more than half a distance, and rounding

Level k of a sample lies in bits [q (k div W), q (k div W) + q) of word k mod W: the levels of one word are W apart, so that a word
is put together from slices that lie side by side in memory. Every sample is coded by itself, so micro-batches and replicas may be
cut in any way. A sample with a value that is not finite is decoded as one without finite values.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch

from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.settings import carried
from gpp.mechanisms.quantised_edges.sizes import (
    ANNOUNCE_BYTES,
    WORD_BYTES,
    clip_factor,
    coded,
    header_words,
    most_bits,
    per_word,
    useful_bits,
    words,
)
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.form import Form
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice
from gpp.runtime.worker.messages import ALIGN, AbstractCoding, Boundary, Layout

GELU_MEAN = 0.0
"""Nearly all values of a GELU are above zero: its clipping takes them for the positive half of a distribution around zero."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """The coding of one tensor of a message.

    Args:
        bits: of a value.
        clip: whether values are clipped before, as for values of a Laplace distribution.
        gelu: whether they are a GELU's.
        dtype: of the values.
        shape: of one sample.
    """

    bits: int
    clip: bool
    gelu: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        """Values of a sample (D)."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """Words of a coded sample (H + W)."""
        return words(self.values, self.bits, _name(self.dtype))

    @property
    def _exact(self) -> torch.dtype:
        """In which levels are computed, and headers sent: narrow types would add errors of their own."""
        return self.dtype if self.dtype.itemsize >= WORD_BYTES else torch.float32

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, *shape] -> [N, H + W] int32."""
        flat, top = tensor.reshape(tensor.shape[0], -1).to(self._exact), (1 << self.bits) - 1
        if self.clip:
            flat = self._clipped(flat)
        low, high = torch.aminmax(flat, dim=1, keepdim=True)
        step = (high - low) / top
        # Of equal values every level is 0. Where no level can be told (a value is not finite), decoding does not read it.
        inverse = step.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
        levels = (flat - low).mul_(inverse).round_().to(torch.int32)
        out = levels.new_empty(len(levels), self.words)
        head, slots = header_words(_name(self.dtype)), per_word(self.bits)
        out[:, :head] = torch.cat((low, step), dim=1).view(torch.int32)
        body, width = out[:, head:], self.words - head
        body.copy_(levels[:, :width])
        for slot in range(1, slots):
            part = levels[:, slot * width : (slot + 1) * width]
            if part.shape[1]:
                body[:, : part.shape[1]].bitwise_or_(part << (slot * self.bits))
        return out

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        """[N, H + W] int32 -> [N, *shape]."""
        head, slots, top = header_words(_name(self.dtype)), per_word(self.bits), (1 << self.bits) - 1
        low, step = coded[:, :head].contiguous().view(self._exact).split(1, dim=1)
        body, width = coded[:, head:], coded.shape[1] - head
        flat = torch.empty(len(coded), self.values, dtype=self._exact, device=coded.device)
        for slot in range(slots):
            part = flat[:, slot * width : (slot + 1) * width]
            if part.shape[1]:
                # The word's sign is a bit like the others.
                part.copy_((body[:, : part.shape[1]] >> (slot * self.bits)) & top)
        return flat.mul_(step).add_(low).to(self.dtype).view(len(coded), *self.shape)

    def _clipped(self, flat: torch.Tensor) -> torch.Tensor:
        """Without what lies further from the mean than pays (`clip_factor`); [N, D] in and out."""
        if self.gelu:
            # The other half of the bell, which is not there, has as much of the square.
            spread, mean = (flat * flat).mean(dim=1, keepdim=True).sqrt_(), GELU_MEAN
        else:
            variance, mean = torch.var_mean(flat, dim=1, keepdim=True, correction=0)
            spread = variance.mul_(0.5).sqrt_()
        reach = spread * clip_factor(self.bits + self.gelu)
        return torch.minimum(torch.maximum(flat, mean - reach), mean + reach)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@final
class KeptRate:
    """The sender's end of a channel.

    Args:
        bytes_of: bits -> bytes of a message for each sample.
        first: bits of the messages before the first announcement.
        ahead: messages from an announcement to the one that it is about.
        sample_s: seconds that the link may take for each sample that it carries.
        window: messages over which it is measured.
    """

    def __init__(self, bytes_of: Callable[[int], float], *, first: int, ahead: int, sample_s: float, window: int) -> None:
        self._bytes_of, self._sample_s, self._window = bytes_of, sample_s, window
        # The bits of the next messages, as both ends know them: each message takes the first, and adds what it announces.
        self._bits, self._next = first, deque([first] * ahead)
        self._bytes, self._seconds, self._count = 0, 0.0, 0

    def note(self, num_bytes: int, seconds: float) -> None:
        """A message has left, for which the link took so long."""
        self._bytes, self._seconds, self._count = self._bytes + num_bytes, self._seconds + seconds, self._count + 1
        if self._count == self._window:
            # A link that takes no time has room for anything.
            rate = self._bytes / self._seconds if self._seconds else float("inf")
            self._bits = most_bits(self._bytes_of, rate * self._sample_s)
            self._bytes, self._seconds, self._count = 0, 0.0, 0

    def next(self) -> tuple[int, int]:
        """Bits of the next message, and those that it announces."""
        self._next.append(self._bits)
        return self._next.popleft(), self._bits


@dataclass(frozen=True, slots=True)
class CodedLayout:
    """The tensors of a message as they travel.

    Args:
        layout: of what travels: [samples, words] in place of a tensor that is quantised.
        quantisers: how each tensor is coded; None for one that travels as it is.
    """

    layout: Layout
    quantisers: tuple[Quantiser | None, ...]

    @classmethod
    def of(cls, lay: Layout, tensors: Sequence[Tensor], bits: int, *, clip: bool) -> CodedLayout:
        """The message of an edge whose floating-point values have so many bits; 0: they travel as they are.

        Args:
            tensors: of the graph, as `lay` has them.
        """
        quantisers = tuple(
            Quantiser(bits=bits, clip=clip, gelu=tensor.values == "gelu", dtype=spec.dtype, shape=tuple(spec.shape))
            if bits and coded(tensor)
            else None
            for tensor, spec in zip(tensors, lay.specs, strict=True)
        )
        pairs = zip(quantisers, lay.specs, strict=True)
        specs = tuple(replace(spec, shape=(q.words,), dtype=torch.int32) if q else spec for q, spec in pairs)
        return cls(Layout(lay.names, specs), quantisers)

    def encoded(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a stage, each [samples, ...], as they travel."""
        return [q.encode(tensor) if q else tensor for q, tensor in zip(self.quantisers, tensors, strict=True)]

    def decoded(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a stage, each [samples, ...], from what travelled."""
        return [q.decode(tensor) if q else tensor for q, tensor in zip(self.quantisers, tensors, strict=True)]


@final
@dataclass(slots=True, kw_only=True)
class FixedBits(AbstractCoding):
    """The messages of an edge whose bits stay."""

    coding: CodedLayout
    device: torch.device
    transport: AbstractTransport

    def most_bytes(self, samples: int) -> int:
        return self.coding.layout.num_bytes(samples)

    def form(self, channel: Channel, samples: int) -> Form:
        return self.coding.layout.form(samples, self.device)

    def arrived(self, channel: Channel, buffer: torch.Tensor, samples: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: self.coding.decoded(self.coding.layout.views(buffer, samples))

    def message(self, channel: Channel, tensors: list[torch.Tensor], samples: int) -> torch.Tensor:
        return self.coding.layout.packed(self.transport, channel, self.coding.encoded(tensors), samples, self.device)


@final
@dataclass(slots=True, kw_only=True)
class FollowingBits(AbstractCoding):
    """The messages of an edge whose bits follow its links: each begins with the bits of a later one.

    Args:
        layouts: by bits; 0: values as they are.
        first: bits of the first messages.
        ahead: messages from an announcement to the one that it is about.
        window: messages over which a sender measures a link.
        sample_s: sender and receiver -> seconds that their link may take for each sample that it carries.
    """

    layouts: Mapping[int, CodedLayout]
    first: int
    ahead: int
    window: int
    sample_s: Mapping[tuple[int, int], float]
    device: torch.device
    transport: AbstractTransport
    # What is known of the messages to come, and of those that are posted; the links.
    _coming: dict[Channel, tuple[deque[int], deque[int]]] = field(default_factory=dict, init=False)
    _rates: dict[Channel, KeptRate] = field(default_factory=dict, init=False)

    def num_bytes(self, bits: int, samples: int) -> int:
        """Bytes of a message."""
        return ANNOUNCE_BYTES + self.layouts[bits].layout.num_bytes(samples)

    def most_bytes(self, samples: int) -> int:
        return max(self.num_bytes(bits, samples) for bits in self.layouts)

    def form(self, channel: Channel, samples: int) -> Form:
        known, posted = self._coming.setdefault(channel, (deque([self.first] * self.ahead), deque()))
        posted.append(bits := known.popleft())
        return Form((self.num_bytes(bits, samples),), torch.uint8, self.device)

    def arrived(self, channel: Channel, buffer: torch.Tensor, samples: int) -> Callable[[], list[torch.Tensor]]:
        known, posted = self._coming[channel]
        known.append(int(buffer[:ANNOUNCE_BYTES].view(torch.int32)[0]))
        coding = self.layouts[posted.popleft()]
        return lambda: coding.decoded(coding.layout.parts(buffer[ANNOUNCE_BYTES:], samples))

    def message(self, channel: Channel, tensors: list[torch.Tensor], samples: int) -> torch.Tensor:
        rate = self._rates.get(channel)
        if rate is None:
            # Of so many samples nothing is padded.
            sizes, pace = (
                {bits: each.layout.num_bytes(ALIGN) / ALIGN for bits, each in self.layouts.items()},
                self.sample_s[channel[3:]],
            )
            rate = KeptRate(sizes.__getitem__, first=self.first, ahead=self.ahead, sample_s=pace, window=self.window)
            self._rates[channel] = rate
        for num_bytes, seconds in self.transport.timed(channel):
            rate.note(num_bytes, seconds)
        bits, later = rate.next()
        coding = self.layouts[bits]
        buffer = self.transport.buffer(channel, Form((self.num_bytes(bits, samples),), torch.uint8, self.device))
        buffer[:ANNOUNCE_BYTES].view(torch.int32)[0] = later
        for part, tensor in zip(coding.layout.parts(buffer[ANNOUNCE_BYTES:], samples), coding.encoded(tensors), strict=True):
            part.copy_(tensor)
        return buffer


class EdgeHooks(Hooks):
    """The quantised messages of a device's stages."""

    def __init__(self, own: OwnDevice) -> None:
        self._own = own

    def boundary(self, stage: int, found: Boundary) -> Boundary:
        plan, graph = self._own.job.plan, self._own.job.graph
        codings = dict[int, AbstractCoding]()
        for (s, t), tensors in plan.edge_tensors(graph).items():
            value = plan.stages[s][EdgeBits]
            if stage in (s, t) and value is not None:
                peer, lay = (t, found.outgoing[t]) if stage == s else (s, found.incoming[s])
                if (coding := self._coding((s, t), value, tensors, lay)) is not None:
                    codings[peer] = coding
        return replace(found, coded=found.coded | codings)

    def _coding(self, edge: tuple[int, int], value: EdgeBits, tensors: Sequence[Tensor], lay: Layout) -> AbstractCoding | None:
        """The coding of an edge's messages; None where its tensors travel as they are."""
        own, bits, settings = self._own, value.to(edge[1]), self._own.job.settings
        made = partial(CodedLayout.of, lay, tensors, clip=value.clip)
        ends = {"device": own.device, "transport": own.transport}
        if value.announces(tensors) and settings.course is not None and settings.kept:
            shares = carried(own.job.plan, edge)
            return FollowingBits(
                layouts={number: made(number) for number in (0, *useful_bits())},
                first=bits,
                # As many receives are posted before the one that is waited for.
                ahead=settings.course.buffers + 1,
                window=int(settings.kept["window"]),
                sample_s={pair: settings.kept["sample_s"] / share for pair, share in shares.items()},
                **ends,
            )
        return FixedBits(coding=made(bits), **ends) if bits else None


class EdgeWorkerPart(AbstractWorkerPart):
    """The codecs of a device."""

    def build(self, own: OwnDevice) -> EdgeHooks:
        return EdgeHooks(own)


WORKER = EdgeWorkerPart()
