"""The common tools of planners of chains over downsets: amounts of all stages, the sweep over sizes, the best prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import Amounts, Params
from gpp.cost.problem import Problem
from gpp.cost.stage import finish_s, pass_times, stage_bytes
from gpp.errors import Infeasible
from gpp.graph.op_graph import bits
from gpp.graph.transients import Transients
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import Predict
from gpp.planners.chains.bottleneck import CAPS, NO_CAP, Room, Way, best_chain
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
        tied = [p for p in graph.params if graph.readers[p.name].bit_count() > 1]
        sizes = [(p, list(np.flatnonzero([p.name in op.params for op in graph.ops]))) for p in tied]
        shared = {p.name for p, _ in sizes}
        own = [Params.of(graph.param_of[name] for name in op.params if name not in shared) for op in graph.ops]
        *sums, self._largest = (np.array(column) for column in zip(*own, strict=True))
        self._param_sums = [family.sums(column) for column in sums]
        self._tied = [(p, family.members[:, readers].sum(axis=1)) for p, readers in sizes]
        self._rows = [(size, family.members[:, list(bits(readers))].sum(axis=1)) for size, readers in graph.rows]
        self._all: Pairs | None = None
        self.live = (~self._made & (self._read > 0)) @ (self._sent + self._back)
        """[num_states] bytes per sample that cross each cut, both passes, each tensor once."""

    def of(self, pairs: np.ndarray) -> Pairs:
        """Some pairs, by index."""
        if self.family.num_pairs > KEPT_PAIRS:
            return self._compute(self.family.start[pairs], self.family.end[pairs])
        new = pairs if self._all is None else pairs[np.isnan(self._all.boundary[pairs])]
        if self._all is None or len(new):
            found = self._compute(self.family.start[new], self.family.end[new])
            if self._all is None:
                # What is one number for all stages, stays one.
                boundary = np.full(self.family.num_pairs, np.nan)
                amounts = Amounts(*(boundary.copy() if np.ndim(part) else part for part in found.amounts))
                self._all = Pairs(amounts, boundary)
            for whole, part in zip((*self._all.amounts, self._all.boundary), (*found.amounts, found.boundary), strict=True):
                if np.ndim(part):
                    whole[new] = part
        return self._all.at(pairs)

    def _compute(self, start: np.ndarray, end: np.ndarray) -> Pairs:
        params = Params(*(column[start] - column[end] for column in self._param_sums), largest=np.zeros(len(start)))
        for param, readers in self._tied:
            inside = readers[start] > readers[end]
            params = params.beside(Params.of([param]).times(inside))
        kept = self._saved[start] - self._saved[end]
        once, fixed, waiting, boundary = np.zeros((4, len(start)))
        for begin in range(0, len(start), CHUNK):
            part = slice(begin, begin + CHUNK)
            a, b = start[part], end[part]
            made, read = self._made[a] & ~self._made[b], self._read[a] - self._read[b]
            leaves, enters = made & (read < self._readers), ~made & (read > 0)
            across = leaves | enters
            kept[part] += leaves @ self._unsaved + enters @ self._bytes
            members = self._members[a] & ~self._members[b]
            if self.problem.update_factors[1]:
                params.largest[part] = np.maximum(params.largest[part], (members * self._largest).max(axis=1))
            inside = self._transients.of(members)
            waiting[part] = leaves @ self._back
            transient = inside.within(enters @ self._back, waiting[part])
            once[part], fixed[part] = transient.slope, transient.fixed
            boundary[part] = across @ (self._sent + self._back)
        rows = np.zeros(len(start))
        for size, readers in self._rows:
            rows = rows + size * (readers[start] > readers[end])
        return Pairs(self.problem.amounts_of(params, kept, once, fixed, rows=rows, waiting=waiting), boundary)


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
        if (found := find(b)) is not None:
            value_s, parts = found
            placement = tuple(stage.devices for stage in chain_plan(problem, "", parts, b).stages)
            return Candidate(value_s, len(parts), b, True, tuple((part.mask, part.num_devices) for part in parts), placement)
    return None


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


class AbstractChainSearch(ABC):
    """The search of one problem, by micro-batch size, for the chain whose slowest stage is fastest (`bottleneck.best_chain`).

    Args:
        budget: of the planner that asks.
        form: of the cuts: `linear` for those of one order, `all` for the graph's, `auto` for these if they are at most `limit`.
        called, fix: what the planner calls cuts, and how to get along where they are more than `limit`.
        prune: whether stages slower than a cap are left out, which is raised step by step.

    Raises:
        Infeasible: the form is `all`, and cuts are more than `limit`.
    """

    def __init__(
        self, problem: Problem, budget: Budget, form: str, limit: int, *, called: str, fix: str, replication: bool, prune: bool
    ) -> None:
        self.problem, self.budget, self.replication, self.seconds = problem, budget, replication, Seconds(problem)
        self.limit, self.num_devices = problem.memory_limit_bytes, problem.cluster.num_devices
        self.link, self.caps = problem.cluster.wiring.common, CAPS if prune else NO_CAP
        graph, weights = problem.graph, np.sum(self.seconds.of(problem.microbatch_sizes()[0]), axis=0)
        masks = None if form == "linear" else all_states(graph, limit, budget)
        if masks is None and form == "all":
            raise Infeasible(f"the graph has more than {limit:,} {called}, {budget.planner}'s limit", fix)
        self.text = "cuts of one depth-first order" if masks is None else f"all {len(masks)} cuts of the graph"
        if masks is None and form == "auto":
            self.text += f" (the graph itself has more than {limit:,})"
        self.family = StateFamily(graph, masks or linear_states(depth_first_order(graph)), weights, budget)
        self.tables, self.most = Tables(problem, self.family), min(self.num_devices, self.family.num_states - 1)

    @abstractmethod
    def work(self, b: int) -> np.ndarray:
        """[num_states] least device seconds of one micro-batch."""

    @abstractmethod
    def ways(self, room: Room, b: int) -> list[Way]:
        """The stages that may be part of a solution, with their times."""

    @abstractmethod
    def part(self, mask: int, way: Way) -> Part:
        """A stage of the solution."""

    def counts(self, b: int) -> list[int]:
        """Numbers of replicas that a stage may have."""
        return replicas(self.problem, b) if self.replication else [1]

    def ideal_s(self) -> dict[int, float]:
        """Micro-batch size -> seconds of a mini-batch that no chain goes below."""
        total = self.problem.minibatch_size
        return {b: total // b * float(self.work(b)[-1]) / self.num_devices for b in self.problem.microbatch_sizes()}

    def find(self, b: int) -> tuple[float, list[Part]] | None:
        """Own objective and stages of the best chain for one micro-batch size; None if nothing fits."""
        family = self.family
        chain = best_chain(
            family, self.work(b), lambda room: self.ways(room, b), self.num_devices, self.budget, depth=self.most, caps=self.caps
        )
        if chain is None:
            return None
        stages = [(family.masks[family.start[cut.pair]] & ~family.masks[family.end[cut.pair]], cut.way) for cut in chain.cuts]
        return chain.value_s, [self.part(mask, way) for mask, way in stages]
