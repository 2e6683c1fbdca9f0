"""Messages of one stage on one device: posted receives, tensors that arrived, tensors that are to be sent.

Several devices may hold the samples of one micro-batch, on either side of an edge. A mailbox joins the sample ranges
that it receives and cuts out those that it sends. Between two stages of one device tensors are handed over in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

import torch

from gpp.program.kinds import BACKWARD, FORWARD
from gpp.runtime.transport.channels import AbstractTransport, Channel, Receive
from gpp.runtime.transport.form import Form
from gpp.runtime.worker.messages import Boundary, Layout

Handover = dict[tuple[str, int, int, int], list[torch.Tensor]]
"""Tensors between stages of one device: (direction, source, destination, first sample) -> tensors, batch first."""


@dataclass(slots=True)
class Posted:
    """Samples [lo, hi) that a compute action waits for; no receive if another stage of this device hands them over.

    Args:
        buffer: the message, when it has come.
        read: makes its tensors, where they travel in another form.
    """

    receive: Receive | None
    peer_stage: int
    peer_device: int
    lo: int
    hi: int
    buffer: torch.Tensor | None = None
    read: Callable[[], list[torch.Tensor]] | None = None


class AbstractMailbox(ABC):
    """Messages of one stage on one device, as the interpreter posts, awaits and sends them.

    A direction is that of the compute action which needs a message or has made it: forward or backward.

    Args:
        transport: carries messages to and from other devices.
    """

    def __init__(self, *, stage: int, device_id: int, transport: AbstractTransport) -> None:
        self.stage, self.device_id, self.transport = stage, device_id, transport
        self._posted: dict[tuple[str, int], list[Posted]] = {}

    @final
    def post(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int) -> None:
        """Start to receive samples [lo, hi) for a coming compute action."""
        receive = None
        if peer_device != self.device_id:
            channel = (direction, peer_stage, self.stage, peer_device, self.device_id)
            receive = self.transport.post(channel, self._form(channel, hi - lo))
        self._posted.setdefault((direction, microbatch), []).append(Posted(receive, peer_stage, peer_device, lo, hi))

    @final
    def expects(self, direction: str, microbatch: int) -> bool:
        """Whether a compute action has messages to wait for."""
        return (direction, microbatch) in self._posted

    @final
    def arrive(self, direction: str, microbatch: int) -> None:
        """Wait for the messages of a compute action."""
        messages = self._posted.pop((direction, microbatch), [])
        for message in messages:
            if message.receive is not None:
                message.buffer = message.receive()
        self._accept(direction, microbatch, messages)

    @final
    def send(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int, last: bool) -> int:
        """Start to send samples [lo, hi) of a compute action's tensors.

        Args:
            last: no other message of these tensors follows, so they are freed.

        Returns:
            Bytes of the message; 0 if it is handed over to a stage of this device.
        """
        if peer_device == self.device_id:
            self._hand_over(direction, microbatch, peer_stage, lo, hi, last)
            return 0
        channel = (direction, self.stage, peer_stage, self.device_id, peer_device)
        tensor, num_bytes = self._message(channel, microbatch, lo, hi, last)
        self.transport.send(channel, tensor)
        return num_bytes

    @abstractmethod
    def _form(self, channel: Channel, samples: int) -> Form:
        """The form of the next message to be posted on a channel, of so many samples."""

    @abstractmethod
    def _accept(self, direction: str, microbatch: int, messages: list[Posted]) -> None:
        """Take over the messages of a compute action, all of which have arrived."""

    @abstractmethod
    def _message(self, channel: Channel, microbatch: int, lo: int, hi: int, last: bool) -> tuple[torch.Tensor, int]:
        """The contiguous tensor to send on a channel, [hi - lo, ...] or [bytes], and the bytes to record for it."""

    @abstractmethod
    def _hand_over(self, direction: str, microbatch: int, peer_stage: int, lo: int, hi: int, last: bool) -> None:
        """Give samples [lo, hi) to another stage of this device."""


@final
class Mailbox(AbstractMailbox):
    """Messages of tensors.

    Args:
        device: where buffers are made.
        boundary: layouts of the stage's messages.
        handover: shared by the mailboxes of this device.
        sends: directions in which this device sends anything; of a replica of several devices not all may.
    """

    def __init__(
        self,
        *,
        stage: int,
        device_id: int,
        transport: AbstractTransport,
        device: torch.device,
        boundary: Boundary,
        handover: Handover,
        sends: Collection[str] = (FORWARD, BACKWARD),
    ) -> None:
        super().__init__(stage=stage, device_id=device_id, transport=transport)
        self.device, self.boundary, self.handover, self._sends = device, boundary, handover, sends
        self._layouts_in, self._layouts_out = boundary.received, boundary.sent
        self._batch_dims = {name: spec.batch_dim for name, spec in boundary.specs().items() if spec.batch_dim}
        self._arrived: dict[tuple[str, int], list[Posted]] = {}
        self._made: dict[tuple[str, int], tuple[int, dict[str, torch.Tensor]]] = {}

    def take(self, direction: str, microbatch: int) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors that arrived for a compute action, neighbour by neighbour. Nobody else has these tensors.

        Several neighbours may send gradients of one name. The batch dimension lies where the stage's module has it.
        """
        arrived = self._arrived.pop((direction, microbatch), None)
        if arrived is None:
            return []
        out = self._tensors(direction, arrived[0]) if len(arrived) == 1 else self._joined(direction, arrived)
        if dims := self._batch_dims:
            return [(name, tensor.movedim(0, dims[name]) if name in dims else tensor) for name, tensor in out]
        return out

    def _tensors(self, direction: str, message: Posted) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors [samples, ...] of a message."""
        peer, buffer = message.peer_stage, message.buffer
        lay = self._layout_in(direction, peer, message.peer_device)
        if buffer is None:
            tensors = self.handover.pop((direction, peer, self.stage, message.lo))
        elif message.read:
            tensors = message.read()
        else:
            tensors = lay.views(buffer, message.hi - message.lo) if lay.names else []
        return list(zip(lay.names, tensors, strict=False))

    def _joined(self, direction: str, messages: list[Posted]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of several messages. The ranges of samples that one neighbour's devices have sent are joined."""
        parts: dict[int, list[Posted]] = {}
        for message in messages:
            parts.setdefault(message.peer_stage, []).append(message)
        out: list[tuple[str, torch.Tensor]] = []
        for found in parts.values():
            places = [key for key in self.boundary.parts if key[:2] == (direction, found[0].peer_stage)]
            if places:
                # All have the same samples, and each has columns of its own.
                found.sort(key=lambda message: places.index((direction, message.peer_stage, message.peer_device)))
            else:
                found.sort(key=lambda message: message.lo)
            first, *more = [self._tensors(direction, message) for message in found]
            if more:
                dim, rows = -1 if places else 0, zip(first, *more, strict=True)
                out += [(row[0][0], torch.cat([tensor for _, tensor in row], dim)) for row in rows]
            else:
                out += first
        return out

    def put(self, direction: str, microbatch: int, lo: int, tensors: dict[str, torch.Tensor]) -> None:
        """Keep a compute action's tensors until they are sent.

        Args:
            lo: their first sample.
            tensors: by name, detached, the batch dimension where the stage's module has it; the mapping is kept.
        """
        if direction not in self._sends or not self._layouts_out[direction]:
            return
        for name, dim in self._batch_dims.items():
            if name in tensors:
                tensors[name] = tensors[name].movedim(dim, 0)
        self._made[direction, microbatch] = lo, tensors

    def _form(self, channel: Channel, samples: int) -> Form:
        direction, peer_stage, _, peer_device, _ = channel
        if direction == FORWARD and (coding := self.boundary.coded.get(peer_stage)):
            return coding.form(channel, samples)
        return self._layout_in(direction, peer_stage, peer_device).form(samples, self.device)

    def _layout_in(self, direction: str, peer_stage: int, peer_device: int) -> Layout:
        return self.boundary.parts.get((direction, peer_stage, peer_device)) or self._layouts_in[direction][peer_stage]

    def _accept(self, direction: str, microbatch: int, messages: list[Posted]) -> None:
        for message in messages if self.boundary.coded and direction == FORWARD else ():
            coding = self.boundary.coded.get(message.peer_stage)
            if coding and message.buffer is not None:
                channel = (direction, message.peer_stage, self.stage, message.peer_device, self.device_id)
                message.read = coding.arrived(channel, message.buffer, message.hi - message.lo)
        if messages:
            self._arrived[direction, microbatch] = messages

    def _message(self, channel: Channel, microbatch: int, lo: int, hi: int, last: bool) -> tuple[torch.Tensor, int]:
        direction, peer_stage, peer_device = channel[0], channel[2], channel[4]
        layout = self.boundary.parts.get((direction, peer_stage, peer_device)) or self._layouts_out[direction][peer_stage]
        rows = self._rows(layout, (channel[0], microbatch), lo, hi, last)
        if channel[0] == FORWARD and (coding := self.boundary.coded.get(channel[2])):
            tensor = coding.message(channel, rows, hi - lo)
        else:
            tensor = layout.packed(self.transport, channel, rows, hi - lo, self.device)
        return tensor, tensor.nbytes

    def _hand_over(self, direction: str, microbatch: int, peer_stage: int, lo: int, hi: int, last: bool) -> None:
        layout = self._layouts_out[direction][peer_stage]
        rows = self._rows(layout, (direction, microbatch), lo, hi, last)
        self.handover[direction, self.stage, peer_stage, lo] = [tensor.detach() for tensor in rows]

    def _rows(self, layout: Layout, key: tuple[str, int], lo: int, hi: int, last: bool) -> list[torch.Tensor]:
        """[hi - lo, ...]: the samples of a compute action's tensors that a neighbour receives, batch first."""
        first, made = self._made.pop(key) if last else self._made[key]
        if layout.whole:
            return [made[name] for name in layout.names]
        if lo == first and len(layout.names) == 1 and (tensor := made[layout.names[0]]).shape[0] == hi - lo:
            return [tensor]
        return [made[name][lo - first : hi - first] for name in layout.names]
