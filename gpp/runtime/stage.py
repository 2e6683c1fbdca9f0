"""One stage on one device: its module, its micro-batches in flight, its messages.

Shapes: a tensor that crosses a stage's border travels with the batch dimension first (`TensorSpec.batch_dim`
says where the module has it), contiguous; the tensors of one message are packed into one buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gpp.runtime.channels import AbstractTransport, Channel, Handle

if TYPE_CHECKING:
    from gpp.capture.stage import StageModule, TensorSpec

Fetch = Callable[[int, int], dict[str, torch.Tensor]]

ALIGN = 16
"""Bytes to which each tensor of a packed message is aligned, so that any dtype can view it."""


@dataclass(slots=True)
class Layout:
    """How the tensors of one message lie in its buffer."""

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]

    def views(self, buffer: torch.Tensor, samples: int) -> list[torch.Tensor]:
        """The tensors inside `buffer`, batch first."""
        if len(self.names) == 1:
            return [buffer]
        out, at = [], 0
        for spec in self.specs:
            shape = (samples, *spec.shape)
            size = _num_bytes(shape, spec.dtype)
            out.append(buffer[at : at + size].view(spec.dtype).view(shape))
            at += -(-size // ALIGN) * ALIGN
        return out

    def buffer(self, samples: int, device: torch.device) -> torch.Tensor:
        """An empty buffer; of an order-only edge, one byte."""
        if not self.names:
            return torch.zeros(1, dtype=torch.uint8, device=device)
        if len(self.names) == 1:
            return torch.empty((samples, *self.specs[0].shape), dtype=self.specs[0].dtype, device=device)
        size = sum(-(-_num_bytes((samples, *spec.shape), spec.dtype) // ALIGN) * ALIGN for spec in self.specs)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def pack(self, tensors: list[torch.Tensor], samples: int, device: torch.device) -> torch.Tensor:
        """One contiguous buffer that holds batch-first `tensors`."""
        if len(tensors) == 1:
            return tensors[0].contiguous()
        buffer = self.buffer(samples, device)
        for view, tensor in zip(self.views(buffer, samples) if tensors else [], tensors, strict=True):
            view.copy_(tensor)
        return buffer


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size


def layout(specs: list[tuple[str, TensorSpec]], *, gradients: bool) -> Layout:
    """The layout of an edge's messages: forwards all tensors, backwards those with a gradient."""
    kept = [(name, spec) for name, spec in specs if spec.differentiable or not gradients]
    return Layout(tuple(name for name, _ in kept), tuple(spec for _, spec in kept))


@dataclass(slots=True)
class _Incoming:
    """A message posted for a compute action."""

    handle: Handle
    buffer: torch.Tensor
    peer_stage: int
    lo: int
    hi: int


@dataclass(slots=True)
class _Pass:
    """A micro-batch between its forward and its backward."""

    leaves: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None


@dataclass(slots=True)
class MemoryMeter:
    """Bytes of the tensors that micro-batches in flight hold, by storage (the CPU has no allocator statistics)."""

    own: set[int]
    held: dict[int, dict[int, int]] = field(default_factory=dict)
    peak_bytes: int = 0

    def note(self, microbatch: int, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.held.setdefault(microbatch, {})[storage.data_ptr()] = storage.nbytes()
        return tensor

    def update(self) -> None:
        merged: dict[int, int] = {}
        for held in self.held.values():
            merged.update(held)
        self.peak_bytes = max(self.peak_bytes, sum(merged.values()))

    def release(self, microbatch: int) -> None:
        self.held.pop(microbatch, None)


def _no_data(lo: int, hi: int) -> dict[str, torch.Tensor]:
    raise RuntimeError("a pass was started without `begin`")


class StageRunner:
    """Runs forwards and backwards of one stage on one device and handles their messages.

    Args:
        module: the stage's module; `evaluation` runs its evaluation twin without gradients.
        incoming, outgoing: neighbour stage -> layout of a forward message.
        returning_in, returning_out: successor -> layout of gradients that come back; predecessor -> that go back.
        pieces: micro-batch -> the samples [lo, hi) that this device holds of it.
        num_samples: of the whole pass; a micro-batch's loss counts by its share.
    """

    def __init__(
        self,
        module: StageModule,
        *,
        stage: int,
        device_id: int,
        device: torch.device,
        transport: AbstractTransport,
        incoming: Mapping[int, Layout],
        outgoing: Mapping[int, Layout],
        returning_in: Mapping[int, Layout],
        returning_out: Mapping[int, Layout],
        pieces: Mapping[int, tuple[int, int]],
        num_samples: int,
        train: bool = True,
    ) -> None:
        self.module, self.stage, self.device_id, self.device, self.transport = module, stage, device_id, device, transport
        self.incoming, self.outgoing, self.returning_in, self.returning_out = incoming, outgoing, returning_in, returning_out
        self.pieces, self.num_samples, self.train = pieces, num_samples, train
        self.meter: MemoryMeter | None = None
        self.results: dict[str, torch.Tensor] = {}
        self._fetch: Fetch = _no_data
        self._seed: Callable[[int], int] = int
        self._posted: dict[tuple[str, int], list[_Incoming]] = defaultdict(list)
        self._passes: dict[int, _Pass] = {}
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._gradients: dict[int, dict[str, torch.Tensor]] = {}
        self._specs = {
            name: spec
            for at in (incoming, outgoing)
            for lay in at.values()
            for name, spec in zip(lay.names, lay.specs, strict=True)
        }

    def begin(self, fetch: Fetch, seed: Callable[[int], int]) -> None:
        """Start a pass over a new mini-batch.

        Args:
            fetch: (lo, hi) -> the user inputs and targets of those samples.
            seed: micro-batch -> seed of its random operations.
        """
        self._fetch, self._seed, self.results = fetch, seed, {}

    def post(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int) -> None:
        """Start to receive samples [lo, hi) for a coming compute action."""
        lay = (self.incoming if direction == "F" else self.returning_in)[peer_stage]
        buffer = lay.buffer(hi - lo, self.device)
        channel: Channel = (direction, peer_stage, self.stage, peer_device, self.device_id)
        handle = self.transport.post(channel, buffer)
        self._posted[direction, microbatch].append(_Incoming(handle, buffer, peer_stage, lo, hi))

    def arrive(self, direction: str, microbatch: int) -> None:
        """Wait for the messages of a compute action."""
        for message in self._posted.get((direction, microbatch), ()):
            message.handle.wait()

    def _arrived(self, direction: str, microbatch: int) -> dict[int, dict[str, torch.Tensor]]:
        """Neighbour -> its tensors of this micro-batch, batch first; `arrive` has waited for them."""
        parts: dict[int, list[tuple[int, list[torch.Tensor]]]] = defaultdict(list)
        lays = self.incoming if direction == "F" else self.returning_in
        for message in self._posted.pop((direction, microbatch), ()):
            lay = lays[message.peer_stage]
            parts[message.peer_stage].append((message.lo, lay.views(message.buffer, message.hi - message.lo) if lay.names else []))
        out = {}
        for peer, found in parts.items():
            found.sort(key=lambda part: part[0])
            columns = zip(*(tensors for _, tensors in found), strict=True)
            out[peer] = {
                name: column[0] if len(column) == 1 else torch.cat(column)
                for name, column in zip(lays[peer].names, columns, strict=False)
            }
        return out

    def forward(self, microbatch: int) -> None:
        """Run the module on the piece of `microbatch` that this device holds."""
        if microbatch not in self.pieces:
            return
        lo, hi = self.pieces[microbatch]
        leaves: dict[str, torch.Tensor] = {}
        for tensors in self._arrived("F", microbatch).values():
            for name, tensor in tensors.items():
                spec = self._specs[name]
                leaf = tensor.movedim(0, spec.batch_dim) if spec.batch_dim else tensor
                leaves[name] = leaf.detach().requires_grad_() if self.train and spec.differentiable else leaf
        values = {**leaves, **(self._fetch(lo, hi) if self.module.inputs else {})}
        if self.module.has_random and self.train:
            torch.manual_seed(self._seed(microbatch))
        with self._hooks(microbatch):
            outputs = self.module(hi - lo, values)
        share = (hi - lo) / self.num_samples
        loss = None
        for name in self.module.results:
            if name in outputs:
                value = outputs.pop(name)
                self._add_result(name, value.detach().double() * share)
                loss = value * share if name == "loss" else loss
        if self.train:
            self._passes[microbatch] = _Pass(leaves, outputs, loss)
            if self.meter:
                for tensor in (*leaves.values(), *outputs.values()):
                    self.meter.note(microbatch, tensor)
                self.meter.update()
        self._outputs[microbatch] = {name: self._batch_first(name, value.detach()) for name, value in outputs.items()}

    def _hooks(self, microbatch: int) -> AbstractContextManager[object]:
        meter = self.meter
        if not meter or not self.train:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda t: meter.note(microbatch, t.detach()), lambda t: t)

    def _add_result(self, name: str, value: torch.Tensor) -> None:
        self.results[name] = self.results[name] + value if name in self.results else value

    def _batch_first(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = self._specs[name].batch_dim
        return tensor.movedim(dim, 0) if dim else tensor

    def backward(self, microbatch: int) -> None:
        """Backward of `microbatch`: gradients of the outputs in, of the received tensors out."""
        if microbatch not in self.pieces:
            return
        done = self._passes.pop(microbatch)
        gradients: dict[str, torch.Tensor] = {}
        for tensors in self._arrived("B", microbatch).values():
            for name, grad in tensors.items():
                gradients[name] = gradients[name] + grad if name in gradients else grad
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        for name, grad in gradients.items():
            output = done.outputs[name]
            if output.requires_grad:
                roots.append(output)
                dim = self._specs[name].batch_dim
                seeds.append(grad.movedim(0, dim) if dim else grad)
        if done.loss is not None and done.loss.requires_grad:
            roots.append(done.loss)
            seeds.append(None)
        if roots:
            torch.autograd.backward(roots, seeds)
        self._gradients[microbatch] = {
            name: self._batch_first(name, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            for name, leaf in done.leaves.items()
            if leaf.requires_grad
        }
        if self.meter:
            self.meter.release(microbatch)

    def send(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int, last: bool) -> int:
        """Send samples [lo, hi) of what `microbatch` made; `last` frees it. Returns the bytes sent."""
        made, lays = (self._outputs, self.outgoing) if direction == "F" else (self._gradients, self.returning_out)
        lay, start = lays[peer_stage], self.pieces[microbatch][0]
        tensors = made[microbatch]
        rows = [tensors[name][lo - start : hi - start] for name in lay.names]
        buffer = lay.pack(rows, hi - lo, self.device)
        self.transport.send((direction, self.stage, peer_stage, self.device_id, peer_device), buffer)
        if last:
            del made[microbatch]
        return buffer.numel() * buffer.element_size()
