"""A planning problem: graph x cluster x cost model x batch, and the amounts that follow from it.

Planners and the simulator ask every time and every byte here, so they cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gpp.cluster import Cluster
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.variants import boundary_bytes, held, passes
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph, Tensor, mask_of
from gpp.graph.sums import SetSums, Sums
from gpp.weights.base import AbstractWeights, PipelinePosition
from gpp.weights.flush import Flush


def check_batch(minibatch_size: Any, microbatch_size: Any) -> None:
    """Refuse sizes that are no positive integers, and a micro-batch that does not divide the mini-batch.

    Raises:
        InvalidConfig: names the size and the nearest one that would do.
    """

    def whole(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    if not whole(minibatch_size):
        raise InvalidConfig("minibatch_size", minibatch_size, "must be an integer of at least 1", "set minibatch_size=64")
    b = microbatch_size
    if b is not None and not (whole(b) and minibatch_size % b == 0):
        small = [d for d in range(1, math.isqrt(minibatch_size) + 1) if minibatch_size % d == 0]
        divisors = {*small, *(minibatch_size // d for d in small)}
        near = min(divisors, key=lambda d: (abs(d - b), d)) if isinstance(b, int) else 1
        raise InvalidConfig("microbatch_size", b, f"must divide minibatch_size={minibatch_size}", f"set microbatch_size={near}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be planned.

    Args:
        minibatch_size: samples between two optimizer steps (B in the paper).
        microbatch_size: imposed by the user; None leaves it to the planner.
        optimizer_state_factor: bytes of optimizer state for each byte of trainable parameter.
        in_flight: what a stage keeps: as many micro-batches as its distance to the sink asks for
            (`depth`, 1F1B) or the whole mini-batch (`all`, GPipe).
        global_norm: whether all devices meet before the update, to clip by the norm of all gradients.
        minibatch_ops: mask of the operators that must have the whole mini-batch at once (`gpp.plan.loss_stage`).
        weights: how many versions of the weights a stage holds.
        prediction_traffic: bytes moved to extrapolate a byte of weights (`gpp.optimizers`).
        window: mini-batches that pass between two drains, as planners see it: `minibatch_size` is then that of all of them
            together, and the update comes `window` times. 1 where every mini-batch drains.
        assumed_copies: of the weights, wherever a stage's place in the pipeline is not known yet.
        max_replicas: of a stage; None for as many as there are devices. 1 for a model that runs at one batch size only.
    """

    graph: OpGraph
    cluster: Cluster
    cost: AbstractCostModel
    minibatch_size: int
    microbatch_size: int | None = None
    optimizer_state_factor: float = 0.0
    in_flight: Literal["depth", "all"] = "depth"
    max_replicas: int | None = None
    minibatch_ops: int = 0
    global_norm: bool = False
    weights: AbstractWeights = field(default_factory=Flush)
    prediction_traffic: float = 3.0
    window: int = 1
    assumed_copies: int = 1
    _times: dict[tuple[int, int], OpTimes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[int, SetSums] = field(default_factory=dict, init=False, repr=False, compare=False)
    _memory: dict[int, tuple[float, float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_batch(self.minibatch_size, self.microbatch_size)

    def microbatch_sizes(self, depth: int | None = None) -> tuple[int, ...]:
        """Sizes that a planner may try, ascending: powers of two that divide the mini-batch, or the imposed one.

        A weight policy may ask for a number of micro-batches that grows with the depth.

        Args:
            depth: of the pipeline; None for one whose depth is not known yet: sizes that do for as many stages as devices.
        """
        if self.microbatch_size is not None:
            return (self.microbatch_size,)
        minibatch = self.minibatch_size // self.window
        sizes = [1]
        while minibatch % (2 * sizes[-1]) == 0:
            sizes.append(2 * sizes[-1])
        if sizes[-1] != minibatch:
            sizes.append(minibatch)
        least = self.weights.least_accumulation(depth or self.cluster.num_devices)
        return tuple(b for b in sizes if minibatch // b >= least) or (1,)

    def accumulation(self, microbatch_size: int) -> int:
        """Micro-batches between two updates."""
        return self.minibatch_size // self.window // microbatch_size

    @property
    def static_factor(self) -> float:
        """Bytes of weights, gradients and optimizer state for each byte of trainable parameter, with the copies assumed."""
        return 1.0 + self.assumed_copies + self.optimizer_state_factor

    @cached_property
    def type_of_device(self) -> tuple[int, ...]:
        """For each device the first one that equals it."""
        devices = self.cluster.devices
        return (0,) * len(devices) if self.cluster.homogeneous else tuple(devices.index(device) for device in devices)

    def op_times(self, samples: int, device: int) -> OpTimes:
        """Times of every operator for `samples` samples on device number `device`; no backward where nothing is differentiated."""
        key = (samples, self.type_of_device[device])
        if key not in self._times:
            times = self.cost.op_times(self.graph, samples, self.cluster.devices[device])
            if self.graph.differentiated != self.graph.all_mask:
                times = replace(times, backward_s=np.where(self.graph.amounts.differentiated, times.backward_s, 0.0))
            self._times[key] = times
        return self._times[key]

    def stage_times(
        self,
        ops: tuple[int, ...],
        microbatch_size: int,
        devices: tuple[int, ...],
        recompute: tuple[int, ...] = (),
        tensor_parallel: int = 1,
        turns: int = 1,
    ) -> tuple[float, float]:
        """Forward and backward seconds of one micro-batch, split over the replicas; the slowest device decides.

        Args:
            turns: replicas that take whole micro-batches in turn (`Stage.turns`): the time is then one replica's.
        """
        samples = -(-microbatch_size * tensor_parallel * turns // len(devices))
        index = list(ops)
        pairs, boundary_s = [], 0.0
        if tensor_parallel > 1:
            boundary = boundary_bytes(self.graph, ops, recompute, tensor_parallel)
            boundary_s = boundary * samples / self.cluster.link(devices[0], devices[tensor_parallel - 1]).bandwidth_bytes_per_s
        for device in {self.type_of_device[d] for d in devices}:
            times = self.op_times(samples, device)
            if recompute or tensor_parallel > 1:
                forward, backward = passes(self.graph, times, ops, recompute, tensor_parallel)
                pairs.append((forward + boundary_s, backward + boundary_s))
                continue
            pairs.append((float(times.forward_s[index].sum()), float(times.backward_s[index].sum())))
        return max(f for f, _ in pairs), max(b for _, b in pairs)

    @cached_property
    def _sums(self) -> Sums:
        return Sums(self.graph)

    def param_bytes(self, mask: int) -> tuple[float, float]:
        """Bytes of trainable and of frozen parameters that a set of operators reads, each counted once."""
        sums = self.sums(mask)
        return sums.trainable, sums.frozen

    def sums(self, mask: int) -> SetSums:
        """What a set of operators keeps, holds and sends."""
        if mask not in self._known:
            self._known[mask] = self._sums.of(mask)
        return self._known[mask]

    def amounts(self, mask: int) -> tuple[float, float, float]:
        """Of a stage: static bytes; bytes per sample in flight; bytes per sample of one micro-batch (gradients at its boundary)."""
        if mask not in self._memory:
            sums = self.sums(mask)
            static = sums.trainable * self.static_factor + sums.frozen
            kept = sums.saved + sums.kept
            # Without a backward pass nothing is in flight: what comes in and goes out is held for one micro-batch.
            self._memory[mask] = (static, kept, sums.grads) if mask & self.graph.differentiated else (static, 0.0, kept)
        return self._memory[mask]

    def trainable_bytes(self, ops: tuple[int, ...], tensor_parallel: int = 1) -> float:
        """Bytes of trainable parameters on one device of a stage."""
        if tensor_parallel == 1:
            return self.param_bytes(mask_of(ops))[0]
        return held(self.graph, ops, (), tensor_parallel).trainable

    def stage_memory(
        self,
        ops: tuple[int, ...],
        microbatch_size: int,
        num_devices: int,
        in_flight: int,
        recompute: tuple[int, ...] = (),
        tensor_parallel: int = 1,
        depth: int | None = None,
        turns: int = 1,
    ) -> float:
        """Peak bytes on one device of a stage.

        Weights in all their versions, their gradients and the optimizer's state; the activations of the samples in flight
        (saved tensors and what crosses the stage's boundary); the boundary's gradients of one micro-batch.

        Args:
            num_devices: that a micro-batch is split over.
            in_flight: samples in flight on all of those (a multiple of `microbatch_size`).
            recompute, tensor_parallel: as in `gpp.plan.stage.Stage`; see `gpp.cost.variants`.
            depth: of the pipeline, for policies whose copies depend on it; None: the stage is its first.
            turns: how many such groups of devices take micro-batches in turn.
        """
        mask = mask_of(ops)
        static, kept, grads = self.amounts(mask)
        samples = -(-microbatch_size * tensor_parallel // num_devices)
        trainable = self.sums(mask).trainable
        if recompute or tensor_parallel > 1:
            own = held(self.graph, ops, recompute, tensor_parallel)
            static, trainable = own.trainable * self.static_factor + own.frozen, own.trainable
            kept += own.kept - sum(self.graph.ops[op].saved_bytes for op in ops)
            grads += own.extra
        if not self.weights.flushes:
            static += trainable * (self.weight_copies(microbatch_size, in_flight, depth, turns) - self.assumed_copies)
        return static + kept * samples * (in_flight // microbatch_size) + grads * samples

    def weight_times(
        self, ops: tuple[int, ...], device: int, place: PipelinePosition, tensor_parallel: int = 1
    ) -> tuple[float, float, float]:
        """Seconds that the weight policy adds to a stage's forward, to its backward and to its update."""
        if self.weights.flushes:
            return 0.0, 0.0, 0.0
        held_bytes, traffic = self.trainable_bytes(ops, tensor_parallel), self.weights.traffic(place, self.prediction_traffic)
        forward, backward, update = (self.cost.move_s(amount * held_bytes, self.cluster.devices[device]) for amount in traffic)
        return forward, backward, update

    def weight_copies(self, microbatch_size: int, in_flight: int, depth: int | None = None, turns: int = 1) -> int:
        """Copies of the weights that a stage holds; arguments as of `stage_memory`."""
        count = max(in_flight // microbatch_size, 1)
        accumulation = max(self.accumulation(microbatch_size) // turns, 1)
        return self.weights.copies(PipelinePosition(warmup=count - 1, depth=depth or count, accumulation=accumulation))

    def crossing(self, src: int, dst: int) -> tuple[Tensor, ...]:
        """Tensors that operators of mask `src` hand to operators of mask `dst`, in order."""
        graph = self.graph
        return tuple(graph.tensors[i] for i in graph.made_by(src) if graph.consumer_masks[i] & dst)

    @property
    def memory_limit_bytes(self) -> float:
        """Of the smallest device: what a plan that may land anywhere can rely on."""
        return min(device.memory_bytes for device in self.cluster.devices)

    def total_s(self, microbatch_size: int) -> float:
        """Forward plus backward of the whole graph for one micro-batch on the fastest device."""
        best = max(range(self.cluster.num_devices), key=lambda d: self.cluster.devices[d].speed_factor)
        times = self.op_times(microbatch_size, best)
        return float(np.sum(times.forward_s) + np.sum(times.backward_s))
