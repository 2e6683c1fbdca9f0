"""A planning problem: graph x cluster x cost model x batch, and the amounts that follow from it.

Planners and the simulator ask every time and every byte here, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, final

import numpy as np

from gpp.cluster import Cluster
from gpp.cost.amounts import Amounts, Params, rows_bytes
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.overheads import Overheads
from gpp.cost.regime import AbstractUpdates, Regime
from gpp.cost.tensors import StageTensors
from gpp.cost.uneven import Varying
from gpp.cost.variants import NOTHING_AGAIN, Repeats, held, passes
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph, Tensor, mask_of
from gpp.graph.sums import OpSums, SetSums
from gpp.optimizers import AbstractOptimizer

ENDLESS = 1e18
"""Bytes of memory that nothing fills."""


def divisors(number: int) -> list[int]:
    """The divisors of a positive integer, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


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
        near = min(divisors(minibatch_size), key=lambda d: (abs(d - b), d)) if isinstance(b, int) else 1
        raise InvalidConfig("microbatch_size", b, f"must divide minibatch_size={minibatch_size}", f"set microbatch_size={near}")


def _nothing(plan: object) -> None:
    """The check of an engine that runs every plan."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class Remembered(Generic[K, V]):
    """Answers about a problem that are kept with it: question -> answer, for questions of one kind.

    Each kind stands beside the function that answers it. A problem that differs in anything has none of them.
    """

    __slots__ = ()

    def of(self, problem: Problem) -> dict[K, V]:
        """The answers so far."""
        return problem._remembered.setdefault(self, {})


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A planning problem.

    Args:
        minibatch_size: samples between two optimizer steps (B in the paper).
        microbatch_size: imposed by the user; None leaves it to the planner.
        optimizer_state_factor: bytes of optimizer state for each byte of trainable parameter.
        updates: which part of a stage's update each of its replicas makes; None: all of it.
        global_norm: whether all devices meet before the update, for the norm of all gradients (to clip by it, or to log it).
        norm_for: what asks for that norm, for messages: setting, value, and what to set instead.
        minibatch_ops: mask of the operators that must have the whole mini-batch at once (`gpp.plan.loss_stage`).
        optimizer: its settings, for weight policies that keep more or less beside its state; None: nothing of it is known.
        regime: what the strategy says of time and memory.
        refuses: why the engine that is to run a plan cannot; None if it can.
        max_replicas: the most replicas of a stage; None: as many as devices. 1 for a model that runs at one batch size only.
        copies: whether there may be copies of a whole pipeline then, each with micro-batches of that size (`gpp.plan.copies`).
        varying: how the work differs from sample to sample; None: it does not.

    >>> cluster = flat(num_devices=2, bandwidth_bytes_per_s=1e9, memory_bytes=1e12)
    >>> Problem(graph=equal_chain(2), cluster=cluster, cost=Constant(), minibatch_size=8).microbatch_sizes()
    (1, 2, 4, 8)
    """

    graph: OpGraph
    cluster: Cluster
    cost: AbstractCostModel
    minibatch_size: int
    microbatch_size: int | None = None
    optimizer_state_factor: float = 0.0
    updates: AbstractUpdates | None = None
    max_replicas: int | None = None
    copies: bool = False
    varying: Varying | None = None
    minibatch_ops: int = 0
    global_norm: bool = False
    norm_for: tuple[str, object, str] | None = None
    optimizer: AbstractOptimizer | None = None
    regime: Regime = field(default_factory=Regime)
    refuses: Callable[[Any], str | None] = field(default=_nothing, repr=False, compare=False)
    overheads: Overheads = field(default_factory=Overheads)
    _times: dict[tuple[int, int, int], OpTimes] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[int, SetSums] = field(default_factory=dict, init=False, repr=False, compare=False)
    _amounts: dict[int, Amounts] = field(default_factory=dict, init=False, repr=False, compare=False)
    _remembered: dict[Remembered[Any, Any], dict[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_batch(self.minibatch_size, self.microbatch_size)

    def microbatch_sizes(self, depth: int | None = None) -> tuple[int, ...]:
        """Sizes that a planner tries, ascending: every divisor of the mini-batch, or the imposed one.

        Powers of two alone would leave out most numbers of replicas, since replicas divide a micro-batch.
        A weight policy may ask for a number of micro-batches that grows with the depth.

        Args:
            depth: of the pipeline; None for one whose depth is not known yet: sizes that do for as many stages as devices.
        """
        if self.microbatch_size is not None:
            return (self.microbatch_size,)
        minibatch = self.minibatch_size // self.regime.minibatches
        least = self.regime.weights.least_accumulation(depth or self.cluster.num_devices)
        return tuple(b for b in divisors(minibatch) if minibatch // b >= least) or (1,)

    def accumulation(self, microbatch_size: int) -> int:
        """Micro-batches between two updates."""
        return self.minibatch_size // self.regime.minibatches // microbatch_size

    @cached_property
    def type_of_device(self) -> tuple[int, ...]:
        """Device -> the first device that equals it."""
        devices = self.cluster.devices
        return (0,) * len(devices) if self.cluster.homogeneous else tuple(devices.index(device) for device in devices)

    def first_of_each_type(self, devices: tuple[int, ...]) -> list[int]:
        """The first device of each type among `devices`, ascending."""
        return sorted({self.type_of_device[d] for d in devices})

    def op_times(self, samples: int, device: int, degree: int = 1) -> OpTimes:
        """Times of every operator for `samples` samples on device number `device`; no backward where nothing is differentiated.

        Whoever makes a result of the model writes it, too, where results are written.

        Args:
            degree: devices that share the work of each operator that declares shares.
        """
        key = (samples, self.type_of_device[device], degree)
        if key not in self._times:
            of = partial(self.cost.op_times, self.graph, device=self.cluster.devices[device], degree=degree)
            times = of(samples) if self.varying is None else self.varying.times(of, samples)
            if self.graph.differentiated != self.graph.all_mask:
                where = self.graph.amounts.differentiated
                times = replace(
                    times,
                    backward_s=np.where(where, times.backward_s, 0.0),
                    weight_s=np.where(where, times.weight_s, 0.0),
                )
            if (course := self.regime.course) is not None and course.writes and self.overheads.answer_s_per_byte:
                written = np.array([op.answer_bytes for op in self.graph.ops]) * samples
                times = replace(times, forward_s=times.forward_s + written * self.overheads.answer_s_per_byte)
            self._times[key] = times
        return self._times[key]

    def stage_times(
        self, ops: tuple[int, ...], microbatch_size: int, devices: tuple[int, ...], stride: int = 1
    ) -> tuple[float, float]:
        """Forward and backward seconds of one micro-batch, split over the replicas; the slowest device decides.

        The fixed cost of a pass is in them; that of messages, which depends on the plan, is in `Plan.bills`.

        Args:
            stride: micro-batches in a row of which a replica has a part in one; the time is that of its part.
        """
        return self.split_times(ops, microbatch_size, devices, stride)[:2]

    def split_times(
        self,
        ops: tuple[int, ...],
        microbatch_size: int,
        devices: tuple[int, ...],
        stride: int = 1,
        repeats: Repeats | None = None,
        degree: int = 1,
        exchange: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float, float]:
        """As `stage_times`, with the backward's seconds for the gradients of the weights as the last value.

        Args:
            repeats: what is done again; None: nothing.
            degree: devices of each replica.
            exchange: seconds that these exchange tensors in a forward and in a backward.
        """
        samples = -(-microbatch_size * degree * stride // len(devices))
        index = list(ops)
        found = list[tuple[float, float, float]]()
        for device in {self.type_of_device[d] for d in devices}:
            times = self.op_times(samples, device, degree)
            if repeats is not None or degree > 1:
                forward, backward, weight = passes(self.graph, times, ops, repeats or NOTHING_AGAIN, degree)
                found.append((backward + exchange[1], weight, forward + exchange[0]))
                continue
            found.append(
                (float(times.backward_s[index].sum()), float(times.weight_s[index].sum()), float(times.forward_s[index].sum()))
            )
        fixed = self.overheads
        returns = mask_of(ops) & self.graph.differentiated
        backward, weight, _ = max(found)
        return max(f for *_, f in found) + fixed.forward_s, backward + (fixed.backward_s if returns else 0.0), weight

    def tensors_of(self, ops: tuple[int, ...]) -> StageTensors:
        """A stage's operators and the tensors between them; none is split over devices."""
        made = _TENSORS.of(self)
        if ops not in made:
            saved = {op: self.graph.ops[op].saved_bytes for op in ops}
            made[ops] = StageTensors(self.graph, ops, saved, self.sums(mask_of(ops)))
        return made[ops]

    @cached_property
    def _sums(self) -> OpSums:
        return OpSums(self.graph)

    def sums(self, mask: int) -> SetSums:
        """The sums over a set of operators: what it keeps, holds and sends."""
        if mask not in self._known:
            self._known[mask] = self._sums.of(mask)
        return self._known[mask]

    def transient_bytes(self, mask: int, samples: int) -> float:
        """Bytes that a set of operators with a backward, neither recomputed nor split, takes with so many samples beyond what is
        held; the line that `amounts` has for any number of samples is not below it."""
        sums = self.sums(mask)
        return samples * sums.outgoing_back + max(self._sums.transient(mask, samples), samples * sums.incoming_back)

    def amounts(self, mask: int) -> Amounts:
        """The parts of a stage's bytes, its operators neither recomputed nor split."""
        found = self._amounts.get(mask)
        if found is None:
            sums = self.sums(mask)
            kept, once, late, waiting = sums.saved + sums.kept, sums.transient, sums.late, sums.outgoing_back
            if not mask & self.graph.differentiated and self.regime.trains:
                # Without a backward pass nothing is in flight: what comes in and goes out is held for one micro-batch.
                kept, once, late, waiting = 0.0, kept + once, 0.0, sums.kept
            params = Params(sums.trainable, sums.frozen, sums.narrow, sums.largest)
            found = self._amounts[mask] = self.amounts_of(
                params, kept, once, sums.fixed, rows=sums.rows, late=late, waiting=waiting
            )
        return found

    def amounts_of(
        self, params: Params, kept: Any, once: Any, fixed: Any, *, rows: Any = 0.0, late: Any = 0.0, waiting: Any = 0.0
    ) -> Amounts:
        """The amounts of stages that read these parameters: with the optimizer's bytes, with the user inputs that they read, and
        with the buffers of messages where nothing is trained. `Amounts` says what the others are.

        Args:
            rows: bytes per sample of user inputs and targets.
        """
        trainable, frozen, narrow, largest = params
        static, update, drains, course = trainable * (2.0 + self.state_factor) + frozen, 0.0, True, self.regime.course
        if course is None:
            static = static + rows_bytes(rows, self.minibatch_size)
            of_all, of_largest = self.update_factors
            if of_all or of_largest:
                # Where no pass is under way, an update has the room of the narrow copies for itself.
                drains = self.regime.weights.flushes
                update = of_all * trainable + of_largest * largest - (narrow if drains else 0.0)
        amounts = Amounts(
            trainable,
            version=trainable + narrow,
            static=static,
            kept=kept,
            once=once,
            fixed=fixed,
            late=late,
            waiting=waiting,
            update=update,
            drains=drains,
        )
        return amounts if course is None else amounts.buffered(course.buffers, rows)

    def trainable_bytes(self, ops: tuple[int, ...], degree: int = 1) -> float:
        """Bytes of trainable parameters on one device of a stage; `degree` as in `split_times`."""
        if degree == 1:
            return self.sums(mask_of(ops)).trainable
        return held(self.graph, ops, (), degree).params.trainable

    def updated_share(self, ops: tuple[int, ...], replicas: int) -> float:
        """Part of a stage's trainable parameters that the busiest of its replicas updates."""
        if self.updates is None or replicas == 1:
            return 1.0
        names = sorted({name for op in ops for name in self.graph.trained_by[op]})
        return self.updates.largest({name: self.graph.param_of[name].num_bytes for name in names}, replicas)

    def crossing(self, src: int, dst: int) -> tuple[Tensor, ...]:
        """Tensors that operators of mask `src` hand to operators of mask `dst`, in order."""
        graph = self.graph
        return tuple(graph.tensors[i] for i in graph.made_by(src) if graph.consumer_masks[i] & dst)

    def sent_bytes(self, tensor: Tensor) -> float:
        """Bytes of a tensor in a message for each sample, as planners see them before a plan has edges."""
        edges = self.regime.edges
        return tensor.bytes_per_sample if edges is None else edges.sent_bytes(tensor, self.graph.dtype)

    @cached_property
    def state_factor(self) -> float:
        """Bytes kept beside weights and gradients for each byte of trainable parameter: the optimizer's and the weight policy's."""
        return self.optimizer_state_factor + self.regime.weights.kept_factor(self.optimizer)

    @cached_property
    def update_factors(self) -> tuple[float, float]:
        """`AbstractOptimizer.update_factors`."""
        return (0.0, 0.0) if self.optimizer is None else self.optimizer.update_factors

    @property
    def shares_operators(self) -> bool:
        """Whether several devices may run an operator together, each with a part of its weights: these drain before every update,
        and no number's update looks at the other parts."""
        return self.regime.weights.flushes and (self.optimizer is None or self.optimizer.elementwise)

    @property
    def memory_limit_bytes(self) -> float:
        """The memory of the smallest device. A plan that may land anywhere can rely on no more."""
        return min(device.memory_bytes for device in self.cluster.devices)

    @cached_property
    def with_endless_memory(self) -> Problem:
        """The problem on devices with room for everything."""
        devices = tuple(replace(device, memory_bytes=ENDLESS) for device in self.cluster.devices)
        return replace(self, cluster=replace(self.cluster, devices=devices))

    def total_s(self, microbatch_size: int) -> float:
        """Seconds of a forward and a backward of the whole graph for one micro-batch on the fastest device."""
        best = max(range(self.cluster.num_devices), key=lambda d: self.cluster.devices[d].speed_factor)
        times = self.op_times(microbatch_size, best)
        return float(np.sum(times.forward_s) + np.sum(times.backward_s))


_TENSORS = Remembered[tuple[int, ...], StageTensors]()
