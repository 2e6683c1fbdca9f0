"""Layout of the messages that cross the boundary of a stage: the tensors of one message lie in one contiguous buffer.

Shapes: a tensor travels with the batch dimension first (`BoundaryTensor.batch_dim` says where the module has it).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, KINDS, SENDS, Action, Direction
from gpp.program.lower import POSTED_AHEAD
from gpp.program.program import channel_of
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import RingSize

if TYPE_CHECKING:
    from gpp.capture.stage import BoundaryTensor, StageModule

ALIGN = 16
"""Bytes to which each tensor of a packed message is aligned, so that any dtype can view it."""


@dataclass(slots=True)
class Layout:
    """Arrangement of the tensors of one message in its buffer.

    Args:
        specs: forms of the tensors, without the samples' dimension.
        whole: whether its tensors have no dimension of samples, so that their specs' shapes are complete.
    """

    names: tuple[str, ...]
    specs: tuple[BoundaryTensor, ...]
    whole: bool = False
    forms: dict[tuple[int, torch.device], Form] = field(default_factory=dict, compare=False, repr=False)

    def views(self, buffer: torch.Tensor, samples: int) -> list[torch.Tensor]:
        """The tensors inside `buffer`, each [samples, ...]. A single one is the buffer; several lie in it as bytes."""
        if len(self.names) == 1:
            return [buffer]
        return self.parts(buffer, samples)

    def parts(self, buffer: torch.Tensor, samples: int) -> list[torch.Tensor]:
        """The tensors, each [samples, ...], that lie one behind the other in `buffer`, [bytes] of at least `num_bytes`."""
        out, at = [], 0
        for spec in self.specs:
            shape = self._shape(spec, samples)
            size = _num_bytes(shape, spec.dtype)
            out.append(buffer[at : at + size].view(spec.dtype).view(shape))
            at += -(-size // ALIGN) * ALIGN
        return out

    def num_bytes(self, samples: int) -> int:
        """Bytes of a message."""
        if not self.names:
            return 1
        sizes = [_num_bytes(self._shape(spec, samples), spec.dtype) for spec in self.specs]
        return sizes[0] if len(sizes) == 1 else sum(-(-size // ALIGN) * ALIGN for size in sizes)

    def form(self, samples: int, device: torch.device) -> Form:
        """The form of a message; one byte for an order-only edge."""
        found = self.forms.get((samples, device))
        if found is None:
            if len(self.names) == 1:
                found = Form(self._shape(self.specs[0], samples), self.specs[0].dtype, device)
            else:
                found = Form((self.num_bytes(samples),), torch.uint8, device)
            self.forms[samples, device] = found
        return found

    def _shape(self, spec: BoundaryTensor, samples: int) -> tuple[int, ...]:
        return spec.shape if self.whole else (samples, *spec.shape)

    def packed(
        self, transport: AbstractTransport, channel: Channel, tensors: list[torch.Tensor], samples: int, device: torch.device
    ) -> torch.Tensor:
        """The contiguous message of `tensors`, each [samples, ...]; the byte of an order-only edge says nothing."""
        if len(tensors) == 1:
            return tensors[0].contiguous()
        buffer = transport.buffer(channel, self.form(samples, device))
        for view, tensor in zip(self.parts(buffer, samples), tensors, strict=True):
            view.copy_(tensor)
        return buffer


class AbstractCoding(ABC):
    """The form of an edge's messages forwards at one end, where they are other than its tensors are.

    It is that of one stage on one device; the edge's `Layout` says which tensors a message holds.
    """

    @abstractmethod
    def most_bytes(self, samples: int) -> int:
        """Bytes of the largest message of so many samples."""

    @abstractmethod
    def form(self, channel: Channel, samples: int) -> Form:
        """The form of the next message that is posted on a channel."""

    @abstractmethod
    def arrived(self, channel: Channel, buffer: torch.Tensor, samples: int) -> Callable[[], list[torch.Tensor]]:
        """Take note of the next message that has come on a channel; the result makes its tensors, each [samples, ...]."""

    @abstractmethod
    def message(self, channel: Channel, tensors: list[torch.Tensor], samples: int) -> torch.Tensor:
        """The next message to send on a channel, contiguous, of tensors, each [samples, ...]."""


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def layout(specs: list[tuple[str, BoundaryTensor]], *, gradients: bool) -> Layout:
    """The layout of an edge's messages: forwards all tensors, backwards those with a gradient."""
    kept = [(name, spec) for name, spec in specs if spec.differentiable or not gradients]
    return Layout(tuple(name for name, _ in kept), tuple(spec for _, spec in kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Layouts of a stage's messages, by neighbour stage.

    Args:
        incoming, outgoing: layouts of forward messages, from predecessors and to successors.
        returning_in, returning_out: layouts of gradients, from successors and to predecessors.
        coded: forms of forward messages that are other than their layouts say.
        added: layouts of the messages of mechanisms, by direction and other stage.
        parts: layouts that differ from one device of a neighbour to the next, by direction, neighbour and device; where each has
            columns of all samples, in the order of the columns.
    """

    incoming: dict[int, Layout]
    outgoing: dict[int, Layout]
    returning_in: dict[int, Layout]
    returning_out: dict[int, Layout]
    coded: dict[int, AbstractCoding] = field(default_factory=dict)
    added: dict[Direction, dict[int, Layout]] = field(default_factory=dict)
    parts: dict[tuple[Direction, int, int], Layout] = field(default_factory=dict)

    @property
    def received(self) -> dict[Direction, dict[int, Layout]]:
        """The layouts of the messages that the stage receives, by direction and neighbour."""
        return {FORWARD: self.incoming, BACKWARD: self.returning_in, **self.added}

    @property
    def sent(self) -> dict[Direction, dict[int, Layout]]:
        """The layouts of the messages that the stage sends, by direction and neighbour."""
        return {FORWARD: self.outgoing, BACKWARD: self.returning_out, **self.added}

    def most_bytes(self, action: Action) -> int:
        """Bytes of the largest message that an action may send or receive."""
        ways = self.sent if action.kind in SENDS else self.received
        way, samples = KINDS[action.kind].direction, action.hi - action.lo
        lay = self.parts.get((way, action.peer_stage, action.peer_device)) or ways[way][action.peer_stage]
        coding = self.coded.get(action.peer_stage) if way == FORWARD else None
        return coding.most_bytes(samples) if coding else lay.num_bytes(samples)

    def specs(self) -> dict[str, BoundaryTensor]:
        """Every tensor that the stage receives or sends forward, by name."""
        lays = [*self.incoming.values(), *self.outgoing.values()]
        return {name: spec for lay in lays for name, spec in zip(lay.names, lay.specs, strict=True)}


def boundary(plan: Plan, graph: OpGraph, module: StageModule, stage: int) -> Boundary:
    """The boundary of `stage`, whose module is `module`."""
    out = Boundary(incoming={}, outgoing={}, returning_in={}, returning_out={})
    for (s, t), tensors in plan.carried(graph).items():
        if stage in (s, t):
            specs = [(tensor.name, module.spec(tensor.name)) for tensor in tensors]
            peer = t if stage == s else s
            forward, backward = (out.outgoing, out.returning_in) if stage == s else (out.incoming, out.returning_out)
            forward[peer], backward[peer] = layout(specs, gradients=False), layout(specs, gradients=True)
    return out


def ring_sizes(actions: Iterable[Action], device: int, num_bytes: Callable[[Action], int]) -> dict[Channel, RingSize]:
    """The room that each channel of `device` needs for one run through its actions.

    Args:
        num_bytes: bytes of the largest message that an action may send or receive.
    """
    largest: dict[Channel, int] = {}
    count: Counter[Channel] = Counter()
    for action in actions:
        if action.peer_device not in (-1, device):
            channel = channel_of(action, device)
            largest[channel] = max(largest.get(channel, 1), num_bytes(action))
            count[channel] += 1
    return {channel: RingSize(size, count[channel]) for channel, size in largest.items()}


def sending(actions: Iterable[Action], stage: int) -> frozenset[str]:
    """Directions in which a device's actions send tensors of a stage."""
    return frozenset(KINDS[action.kind].direction for action in actions if action.kind in SENDS and action.stage == stage)


def most_sends(actions: Iterable[Action], plan: Plan) -> int | None:
    """Most sends that a device may have under way in a training step; None where its backwards hold it back anyway.

    A device without backward passes (a frozen tower's) is stopped by nothing: it would send the whole mini-batch ahead,
    and the messages would lie in memory. No stage's forwards are further ahead of another's than the samples that one
    of them keeps in flight, so with room for those on every edge, and for what is posted ahead, somebody always waits
    for the oldest message. Where a device has several stages, `gpp.program.sends` may ask for more.
    """
    found = list(actions)
    if any(KINDS[action.kind].returns or KINDS[action.kind].finishes for action in found):
        return None
    sends = Counter((action.stage, action.microbatch) for action in found if action.kind in SENDS)
    smallest = min((plan.stages[stage].microbatch_size for stage, _ in sends), default=1)
    ahead = -(-max(stage.ahead * stage.unit for stage in plan.stages) // smallest)
    return max(sends.values(), default=1) * (ahead + POSTED_AHEAD)
