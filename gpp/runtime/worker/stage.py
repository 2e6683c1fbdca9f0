"""One stage on one device: its module, its micro-batches in flight, its messages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpp.graph.captured import is_loss
from gpp.program.kinds import BACKWARD, FORWARD
from gpp.runtime.transport.channels import AbstractTransport, Handle
from gpp.runtime.worker.messages import Border, Layout
from gpp.runtime.worker.meter import MemoryMeter

if TYPE_CHECKING:
    from gpp.capture.stage import StageModule
    from gpp.runtime.worker.weights.base import AbstractStageWeights

Fetch = Callable[[int, int], dict[str, torch.Tensor]]

Span = tuple[float, float]
"""When a computation began and when it ended, in seconds of `time.perf_counter`."""

Handover = dict[tuple[str, int, int, int], list[torch.Tensor]]
"""Between the stages of one device: (direction, source stage, destination stage, first sample) -> tensors, batch first."""


@dataclass(slots=True)
class _Incoming:
    """A message posted for a compute action; without a handle it is handed over by another stage of this device."""

    handle: Handle | None
    buffer: torch.Tensor | None
    peer_stage: int
    lo: int
    hi: int


@dataclass(slots=True)
class _Pass:
    """A micro-batch between its forward and its backward."""

    leaves: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None


def _no_data(lo: int, hi: int) -> dict[str, torch.Tensor]:
    raise RuntimeError("a pass was started without `begin`")


class StageRunner:
    """Runs forwards and backwards of one stage on one device and handles their messages.

    Args:
        module: the stage's module, or its evaluation twin.
        boundary: layouts of its messages.
        handover: shared by the stages of this device.
        pieces: micro-batch of one mini-batch (or of an evaluation) -> the samples [lo, hi) that this device holds of it.
        accumulation: micro-batches of a mini-batch; those of later ones in a pass are like these.
        round_robin_degree: replicas that take them in turn; each counts its own for its weights.
        num_samples: of a mini-batch, or of an evaluation; a micro-batch's loss counts by its share.
        train: backward passes follow, so what they need is kept.
        autocast: the type to which forwards are cast where PyTorch's rules allow; messages keep the captured types.
        synchronize: waits for the accelerator, so that a span's end is the end of its kernels.
        weights: decides which weights a pass uses; None where there is one version.
    """

    def __init__(
        self,
        module: StageModule,
        *,
        stage: int,
        device_id: int,
        device: torch.device,
        transport: AbstractTransport,
        boundary: Border,
        handover: Handover,
        pieces: Mapping[int, tuple[int, int]],
        accumulation: int,
        round_robin_degree: int = 1,
        num_samples: int,
        train: bool = True,
        autocast: torch.dtype | None = None,
        synchronize: Callable[[], None] | None = None,
        weights: AbstractStageWeights | None = None,
    ) -> None:
        self.module, self.stage, self.device_id, self.device, self.transport = module, stage, device_id, device, transport
        self.boundary, self.handover = boundary, handover
        self.pieces, self.accumulation, self.num_samples, self.train = pieces, accumulation, num_samples, train
        self.round_robin_degree = round_robin_degree
        self.autocast, self.synchronize = autocast, synchronize
        self.weights = weights
        self.meter: MemoryMeter | None = None
        self.results: dict[int, dict[str, torch.Tensor]] = {}
        self._fetch: Fetch = _no_data
        self._seed: Callable[[int], int] = int
        self._posted: dict[tuple[str, int], list[_Incoming]] = defaultdict(list)
        self._passes: dict[int, _Pass] = {}
        self._made: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self._specs = {
            name: spec
            for at in (boundary.incoming, boundary.outgoing)
            for lay in at.values()
            for name, spec in zip(lay.names, lay.specs, strict=True)
        }

    def begin(self, fetch: Fetch, seed: Callable[[int], int]) -> None:
        """Start a pass. `results` then fills: mini-batch of the pass -> name -> this device's share.

        Args:
            fetch: (lo, hi) -> the user inputs and targets of those samples of the pass.
            seed: micro-batch -> seed of its random operations.
        """
        self._fetch, self._seed, self.results = fetch, seed, {}

    def post(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int) -> None:
        """Start to receive samples [lo, hi) for a coming compute action."""
        handle = buffer = None
        if peer_device != self.device_id:
            buffer = self._layouts_in(direction)[peer_stage].buffer(hi - lo, self.device)
            handle = self.transport.post((direction, peer_stage, self.stage, peer_device, self.device_id), buffer)
        self._posted[direction, microbatch].append(_Incoming(handle, buffer, peer_stage, lo, hi))

    def _layouts_in(self, direction: str) -> dict[int, Layout]:
        return self.boundary.incoming if direction == FORWARD else self.boundary.returning_in

    def arrive(self, direction: str, microbatch: int) -> None:
        """Wait for the messages of a compute action."""
        for message in self._posted.get((direction, microbatch), ()):
            if message.handle is not None:
                message.handle.wait()

    def _arrived(self, direction: str, microbatch: int) -> list[tuple[str, torch.Tensor]]:
        """The tensors of this micro-batch, batch first, neighbour by neighbour; `arrive` has waited for them."""
        posted, lays = self._posted.pop((direction, microbatch), ()), self._layouts_in(direction)
        parts: dict[int, list[tuple[int, list[torch.Tensor]]]] = {}
        for message in posted:
            peer = message.peer_stage
            if message.buffer is None:
                tensors = self.handover.pop((direction, peer, self.stage, message.lo))
            else:
                tensors = lays[peer].views(message.buffer, message.hi - message.lo) if lays[peer].names else []
            parts.setdefault(peer, []).append((message.lo, tensors))
        out: list[tuple[str, torch.Tensor]] = []
        for peer, found in parts.items():
            names = lays[peer].names
            if len(found) == 1:
                out += zip(names, found[0][1], strict=False)
                continue
            found.sort(key=lambda part: part[0])
            columns = zip(*(tensors for _, tensors in found), strict=True)
            out += [(name, torch.cat(column)) for name, column in zip(names, columns, strict=False)]
        return out

    def _piece(self, microbatch: int) -> tuple[int, int] | None:
        """Samples of the pass that this device holds of a micro-batch."""
        minibatch, within = divmod(microbatch, self.accumulation)
        piece = self.pieces.get(within)
        if piece is None or not minibatch:
            return piece
        before = minibatch * self.num_samples
        return piece[0] + before, piece[1] + before

    def forward(self, microbatch: int) -> Span | None:
        """Run the module on the piece of `microbatch` that this device holds; None if it holds none."""
        piece = self._piece(microbatch)
        if piece is None:
            return None
        lo, hi = piece
        leaves: dict[str, torch.Tensor] = {}
        for name, tensor in self._arrived(FORWARD, microbatch):
            spec = self._specs[name]
            leaf = tensor.movedim(0, spec.batch_dim) if spec.batch_dim else tensor
            leaves[name] = leaf.detach().requires_grad_() if self.train and spec.differentiable else leaf
        values = {**leaves, **self._fetch(lo, hi)} if self.module.inputs else leaves
        start = time.perf_counter()
        if self.weights:
            self.weights.forward(microbatch // self.round_robin_degree)
            if self.meter:
                self.meter.own |= self.weights.storages()
        if self.module.has_random:
            torch.manual_seed(self._seed(microbatch))
        with self._modes(microbatch):
            outputs = self.module(hi - lo, values)
        if self.synchronize:
            self.synchronize()
        end = time.perf_counter()
        share = (hi - lo) / self.num_samples
        loss = None
        for name in self.module.results:
            if name in outputs:
                value = outputs.pop(name)
                self._add_result(microbatch // self.accumulation, name, value.detach().double() * share)
                if is_loss(name):
                    loss = value * share if loss is None else loss + value * share
        if self.autocast:
            outputs = {name: value.to(self._specs[name].dtype) for name, value in outputs.items()}
        if self.train:
            self._passes[microbatch] = _Pass(leaves, outputs, loss)
            if self.meter:
                for tensor in (*leaves.values(), *outputs.values()):
                    self.meter.note(self.stage, microbatch, tensor)
                self.meter.update()
        self._made[FORWARD, microbatch] = {name: self._batch_first(name, value.detach()) for name, value in outputs.items()}
        return start, end

    def _modes(self, microbatch: int) -> AbstractContextManager[object]:
        """Under what a forward runs: autocast, the meter's hooks (in the first step), both, or nothing."""
        meter, stage = self.meter if self.train else None, self.stage
        if not meter and not self.autocast:
            return nullcontext()
        modes = ExitStack()
        if self.autocast:
            # Without the cache of cast weights: a micro-batch of the next step must not meet this one's.
            modes.enter_context(torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False))
        if meter:
            note = meter.note
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: note(stage, microbatch, t.detach()), lambda t: t)
            modes.enter_context(hooks)
        return modes

    def _add_result(self, minibatch: int, name: str, value: torch.Tensor) -> None:
        results = self.results.setdefault(minibatch, {})
        results[name] = results[name] + value if name in results else value

    def _batch_first(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = self._specs[name].batch_dim
        return tensor.movedim(dim, 0) if dim else tensor

    def backward(self, microbatch: int) -> Span | None:
        """Backward of `microbatch`: gradients of the outputs in, of the received tensors out; None if it holds no samples."""
        if self._piece(microbatch) is None:
            return None
        done = self._passes.pop(microbatch)
        gradients: dict[str, torch.Tensor] = {}
        for name, grad in self._arrived(BACKWARD, microbatch):
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
        start = time.perf_counter()
        if self.weights:
            self.weights.backward(microbatch // self.round_robin_degree)
        if roots:
            torch.autograd.backward(roots, seeds)
        if self.weights:
            self.weights.done(microbatch // self.round_robin_degree)
        if self.synchronize:
            self.synchronize()
        end = time.perf_counter()
        self._made[BACKWARD, microbatch] = {
            name: self._batch_first(name, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            for name, leaf in done.leaves.items()
            if leaf.requires_grad
        }
        if self.meter:
            self.meter.release(self.stage, microbatch)
        return start, end

    def send(self, direction: str, microbatch: int, peer_stage: int, peer_device: int, lo: int, hi: int, last: bool) -> int:
        """Send samples [lo, hi) of what `microbatch` made; `last` frees it. Returns the bytes sent."""
        lay = (self.boundary.outgoing if direction == FORWARD else self.boundary.returning_out)[peer_stage]
        piece = self._piece(microbatch)
        assert piece is not None
        made, start = self._made[direction, microbatch], piece[0]
        rows = [made[name][lo - start : hi - start] for name in lay.names]
        if last:
            del self._made[direction, microbatch]
        if peer_device == self.device_id:
            self.handover[direction, self.stage, peer_stage, lo] = rows
            return 0
        buffer = lay.pack(rows, hi - lo, self.device)
        self.transport.send((direction, self.stage, peer_stage, self.device_id, peer_device), buffer)
        return buffer.numel() * buffer.element_size()
