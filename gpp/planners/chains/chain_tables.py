"""The common tools of planners of chains over downsets: amounts of all stages, the sweep over sizes, the best prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import Amounts, static_bytes
from gpp.cost.problem import Problem
from gpp.cost.stage import finish_s, pass_times, stage_bytes
from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.transients import Transients
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import Predict
from gpp.planners.chains.downsets import Budget, StateFamily, all_states, linear_states
from gpp.planners.common.candidates import Candidate
from gpp.planners.common.incumbent import MARGIN
from gpp.planners.common.linear_orders import depth_first_order
from gpp.stage import AbstractStageValue, Stage

AUTO_STATES = 500
"""Downsets up to which a planner searches all cuts of the graph by itself: a fraction of a second with every micro-batch size."""

CHUNK = 1 << 13
KEPT_PAIRS = 1 << 20


class Pairs(NamedTuple):
    """Stages between two cuts: arrays of shape [num_stages].

    Args:
        amounts: what their bytes are made of, as in `Problem.amounts`.
        boundary: bytes per sample that cross the boundary, both passes, each tensor once.
    """

    amounts: Amounts
    boundary: np.ndarray

    def at(self, index: np.ndarray) -> Pairs:
        return Pairs(self.amounts.take(index), self.boundary[index])


class Tables:
    """Amounts of a family's stages, reckoned when first asked for, and kept where the pairs are few."""

    def __init__(self, problem: Problem, family: StateFamily) -> None:
        self.problem, self.family, graph = problem, family, problem.graph
        self._tensors = [t for t in graph.tensors if t.consumers]
        shape = (graph.num_ops, len(self._tensors))
        produced, read = np.zeros(shape), np.zeros(shape)
        for i, tensor in enumerate(self._tensors):
            produced[tensor.producer, i] = 1
            read[list(tensor.consumers), i] = 1
        self._members, self._transients = family.members.astype(bool), Transients(graph)
        self._made = (family.members @ produced).astype(bool)
        self._read = (family.members @ read).astype(np.int16)
        self._readers = np.array([len(t.consumers) for t in self._tensors], dtype=np.int16)
        self._bytes = np.array([t.bytes_per_sample for t in self._tensors])
        self._sent = np.array([problem.sent_bytes(t) for t in self._tensors])
        self._back = self._bytes * np.array([t.differentiable for t in self._tensors], dtype=float)
        self._unsaved = self._bytes * np.array([not t.saved for t in self._tensors], dtype=float)
        self._saved = family.sums(np.array([op.saved_bytes for op in graph.ops]))
        sizes = [(p, list(np.flatnonzero([p.name in op.params for op in graph.ops]))) for p in self._shared(graph)]
        shared = {p.name for p, _ in sizes}
        own = [[graph.param_of[name] for name in op.params if name not in shared] for op in graph.ops]
        self._trainable = family.sums(np.array([float(sum(p.num_bytes * p.trainable for p in ps)) for ps in own]))
        self._frozen = family.sums(np.array([float(sum(p.num_bytes * (not p.trainable) for p in ps)) for ps in own]))
        self._tied = [(p, family.members[:, readers].sum(axis=1)) for p, readers in sizes]
        self._rows = [(size, family.members[:, list(bits(readers))].sum(axis=1)) for size, readers in graph.rows]
        self._all: Pairs | None = None
        self.live = self._live()

    @staticmethod
    def _shared(graph: OpGraph) -> list:
        return [p for p in graph.params if graph.readers[p.name].bit_count() > 1]

    def _live(self) -> np.ndarray:
        """[num_states] bytes per sample that cross each cut, both passes, each tensor once."""
        crosses = ~self._made & (self._read > 0)
        return crosses @ (self._sent + self._back)

    def of(self, pairs: np.ndarray) -> Pairs:
        """Some pairs, by index."""
        if self.family.num_pairs > KEPT_PAIRS:
            return self._compute(self.family.start[pairs], self.family.end[pairs])
        if self._all is None:
            *amounts, boundary = np.full((len(Amounts._fields) + 1, self.family.num_pairs), np.nan)
            self._all = Pairs(Amounts(*amounts), boundary)
        new = pairs[np.isnan(self._all.boundary[pairs])]
        if len(new):
            found = self._compute(self.family.start[new], self.family.end[new])
            for whole, part in zip((*self._all.amounts, self._all.boundary), (*found.amounts, found.boundary), strict=True):
                whole[new] = part
        return self._all.at(pairs)

    def _compute(self, start: np.ndarray, end: np.ndarray) -> Pairs:
        trainable, frozen = self._trainable[start] - self._trainable[end], self._frozen[start] - self._frozen[end]
        for param, readers in self._tied:
            size = param.num_bytes * (readers[start] > readers[end])
            trainable, frozen = trainable + size * param.trainable, frozen + size * (not param.trainable)
        kept = self._saved[start] - self._saved[end]
        once, fixed, waiting, boundary = np.zeros((4, len(start)))
        for begin in range(0, len(start), CHUNK):
            part = slice(begin, begin + CHUNK)
            a, b = start[part], end[part]
            made, read = self._made[a] & ~self._made[b], self._read[a] - self._read[b]
            leaves, enters = made & (read < self._readers), ~made & (read > 0)
            across = leaves | enters
            kept[part] += leaves @ self._unsaved + enters @ self._bytes
            inside = self._transients.of(self._members[a] & ~self._members[b])
            waiting[part] = leaves @ self._back
            transient = inside.within(enters @ self._back, waiting[part])
            once[part], fixed[part] = transient.slope, transient.fixed
            boundary[part] = across @ (self._sent + self._back)
        static = static_bytes(trainable, frozen, self.problem.state_factor)
        rows = np.zeros(len(start))
        for size, readers in self._rows:
            rows = rows + size * (readers[start] > readers[end])
        return Pairs(self.problem.with_rows(Amounts(trainable, static, kept, once, fixed, waiting=waiting), rows), boundary)


class Seconds:
    """Times of the operators for every number of samples on one device: the slowest device's."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kinds = sorted(set(problem.type_of_device))
        self._found: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, samples: int, degree: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """[num_ops] forward and backward seconds; `degree` as in `Problem.op_times`."""
        if (samples, degree) not in self._found:
            times = [self.problem.op_times(samples, device, degree) for device in self.kinds]
            self._found[samples, degree] = (
                np.max([t.forward_s for t in times], axis=0),
                np.max([t.backward_s for t in times], axis=0),
            )
        return self._found[samples, degree]


def replicas(problem: Problem, microbatch_size: int) -> list[int]:
    """Numbers of replicas that a stage may have: divisors of the micro-batch."""
    most = min(problem.cluster.num_devices, problem.max_replicas or microbatch_size, microbatch_size)
    return [r for r in range(1, most + 1) if microbatch_size % r == 0]


@dataclass(frozen=True, slots=True)
class Cuts:
    """A family of states and how it came about."""

    family: StateFamily
    linear: bool
    text: str


def choose_cuts(graph: OpGraph, form: str, limit: int, weights: np.ndarray, budget: Budget) -> Cuts | None:
    """All cuts of the graph, or those of one order.

    Args:
        form: `linear`, `all`, or `auto` for all of them if they are at most `limit`.

    Returns:
        None if `all` was asked for and they are more than `limit`.
    """
    masks = None if form == "linear" else all_states(graph, limit, budget)
    if masks is None and form == "all":
        return None
    if masks is not None:
        return Cuts(StateFamily(graph, masks, weights, budget), False, f"all {len(masks)} cuts of the graph")
    text = "cuts of one depth-first order"
    if form == "auto":
        text += f" (the graph itself has more than {limit:,})"
    return Cuts(StateFamily(graph, linear_states(depth_first_order(graph)), weights, budget), True, text)


class Part(NamedTuple):
    """A stage of a chain: its operators, its replicas, its devices where they matter, and what mechanisms say."""

    mask: int
    replicas: int
    devices: tuple[int, ...] | None = None
    mechanisms: tuple[AbstractStageValue, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.replicas * math.prod(value.devices_per_replica for value in self.mechanisms)


def chain_plan(problem: Problem, planner: str, parts: Iterable[Part], microbatch_size: int) -> Plan:
    """The plan of a chain, its stages in order."""
    parts = list(parts)
    sized = [(part.mask, part.num_devices) for part in parts]
    plan = make_plan(problem, planner, sized, microbatch_size, chain=True, ordered=True)
    stages = tuple(
        replace(stage, devices=part.devices or stage.devices, mechanisms=part.mechanisms)
        for stage, part in zip(plan.stages, parts, strict=True)
    )
    return replace(plan, stages=stages)


def fits(problem: Problem, parts: Sequence[Part], microbatch_size: int) -> bool:
    """Whether the stages of a chain fit the smallest device, each as if the pipeline began with it."""
    for depth, part in enumerate(reversed(parts), 1):
        stage = Stage(
            ops=tuple(bits(part.mask)),
            devices=part.devices or tuple(range(part.num_devices)),
            microbatch_size=microbatch_size,
            in_flight=problem.regime.held(depth, problem.minibatch_size // microbatch_size) * microbatch_size,
            mechanisms=part.mechanisms,
        )
        if stage_bytes(problem, stage).peak(stage.ahead) > problem.memory_limit_bytes:
            return False
    return True


def first_that_fits(problem: Problem, find: Callable[[int], tuple[float, list[Part]] | None]) -> Candidate | None:
    """A chain as an example of what fits, for `gpp.planners.common.infeasible.explain`."""
    for b in problem.microbatch_sizes():
        found = find(b)
        if found is not None:
            return _candidate(found[1], found[0], b)
    return None


def _candidate(parts: list[Part], value_s: float, microbatch_size: int) -> Candidate:
    sized = tuple((part.mask, part.num_devices) for part in parts)
    ends = list(accumulate(count for _, count in sized))
    placement = tuple(
        part.devices or tuple(range(end - count, end)) for part, (_, count), end in zip(parts, sized, ends, strict=True)
    )
    return Candidate(value_s, len(parts), microbatch_size, True, sized, placement)


class Best:
    """The chain with the best prediction, over the micro-batch sizes.

    Args:
        ideal_s: micro-batch size -> seconds that no plan of that size goes below.
    """

    def __init__(self, problem: Problem, planner: str, predict: Predict, replication: bool = True) -> None:
        self.problem, self.planner, self.predict, self.replication = problem, planner, predict, replication
        self.plan: Plan | None = None
        self.seconds, self.value_s, self.num_tried = float("inf"), float("inf"), 0

    def sweep(self, ideal_s: dict[int, float], find: Callable[[int], tuple[float, list[Part]] | None], *, prune: bool) -> None:
        """Search every size that could still win, or every size, the most promising first.

        Plain data parallelism, which the tools print beside their plans, is offered too.
        """
        for b in sorted(ideal_s, key=lambda b: (ideal_s[b], -b)):
            if prune and ideal_s[b] >= self.seconds * MARGIN:
                break
            found = find(b)
            if found is not None:
                self.offer(*found, b)
            self._offer_data_parallel(b)

    def _offer_data_parallel(self, b: int) -> None:
        problem, ops = self.problem, tuple(range(self.problem.graph.num_ops))
        r = max(replicas(problem, b)) if self.replication else 1
        if fits(problem, [Part(problem.graph.all_mask, r)], b):
            devices = tuple(range(r))
            finish = finish_s(problem, problem.trainable_bytes(ops), devices) / problem.accumulation(b)
            self.offer(sum(problem.stage_times(ops, b, devices)) + finish, [Part(problem.graph.all_mask, r)], b)

    def offer(self, value_s: float, parts: list[Part], microbatch_size: int) -> None:
        """Keep a chain if it is predicted faster."""
        self.num_tried += 1
        plan = chain_plan(self.problem, self.planner, parts, microbatch_size)
        if self._least_s(plan) >= self.seconds * MARGIN:
            return
        seconds = self.predict(plan).metrics.iteration_s
        if seconds < self.seconds * MARGIN:
            self.plan, self.seconds, self.value_s = plan, seconds, value_s

    def _least_s(self, plan: Plan) -> float:
        """No step of a chain is shorter: the way to a stage and back, where gradients come back, and all its micro-batches.

        A pipeline that does not drain has such ways behind it.
        """
        before, least, returning = 0.0, 0.0, plan.returning(self.problem.graph)
        for s, stage in enumerate(plan.stages):
            b = stage.microbatch_size
            took = sum(pass_times(self.problem, stage, b)[:2])
            least = max(least, before + plan.minibatch_size // b * took)
            before = before + took if self.problem.regime.minibatches == 1 and (s, s + 1) in returning else 0.0
        return least
