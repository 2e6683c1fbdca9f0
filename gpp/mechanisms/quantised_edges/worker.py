"""Messages whose values are coded, on the devices that send and read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import torch

from gpp.graph.op_graph import Tensor
from gpp.mechanisms.quantised_edges.kept_rate import KeptRate, announced
from gpp.mechanisms.quantised_edges.quantiser import Quantiser
from gpp.mechanisms.quantised_edges.settings import carried
from gpp.mechanisms.quantised_edges.sizes import ANNOUNCE_BYTES, coded, useful_bits
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.form import Form
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice
from gpp.runtime.worker.messages import ALIGN, AbstractCoding, Boundary, Layout


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
        known, posted = self._coming.setdefault(channel, (announced(self.first, self.ahead), deque()))
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
            rate = self._rates[channel] = self._sender(channel[3:])
        for num_bytes, seconds in self.transport.timed(channel):
            rate.note(num_bytes, seconds)
        bits, later = rate.next()
        coding = self.layouts[bits]
        buffer = self.transport.buffer(channel, Form((self.num_bytes(bits, samples),), torch.uint8, self.device))
        buffer[:ANNOUNCE_BYTES].view(torch.int32)[0] = later
        for part, tensor in zip(coding.layout.parts(buffer[ANNOUNCE_BYTES:], samples), coding.encoded(tensors), strict=True):
            part.copy_(tensor)
        return buffer

    def _sender(self, ends: tuple[int, int]) -> KeptRate:
        """The state that a sender keeps for a channel."""
        # Of so many samples nothing is padded.
        sizes = {bits: coding.layout.num_bytes(ALIGN) / ALIGN for bits, coding in self.layouts.items()}
        return KeptRate(sizes.__getitem__, first=self.first, ahead=self.ahead, sample_s=self.sample_s[ends], window=self.window)


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
        own, bits, course = self._own, value.to(edge[1]), self._own.job.settings.course
        made = partial(CodedLayout.of, lay, tensors, clip=value.clip)
        ends = {"device": own.device, "transport": own.transport}
        if value.announces(tensors) and course is not None and course.kept:
            shares = carried(own.job.plan, edge)
            return FollowingBits(
                layouts={number: made(number) for number in (0, *useful_bits())},
                first=bits,
                # As many receives are posted before the one that is waited for.
                ahead=course.buffers + 1,
                window=int(course.kept["window"]),
                sample_s={pair: course.kept["sample_s"] / share for pair, share in shares.items()},
                **ends,
            )
        return FixedBits(coding=made(bits), **ends) if bits else None


class EdgeWorkerPart(AbstractWorkerPart):
    """The codecs of a device."""

    def build(self, own: OwnDevice) -> EdgeHooks:
        return EdgeHooks(own)


WORKER = EdgeWorkerPart()
