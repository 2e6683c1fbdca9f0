"""Per-stage micro-batch sizes and k of kFkB: what GraphPipe's search allows and its evaluation leaves out.

Objective: the predicted iteration time, by the simulator, since the fast recurrence is for equal micro-batches only.

Starting from the best uniform plans, one group of stages at a time gets another size or another k: single stages, all that are
alike, all before a stage with it, all behind it with it; or one boundary moves, or a stage is split onto an idle device.
Whenever sizes differ, the k with which all stages turn over as many samples at a time is tried beside the k that they
have. Plans of few stages get every combination at once. Neighbours are simulated by ascending bound while that can win,
and the best is the next start.

Constraints:
1. b is one of `Problem.microbatch_sizes`, a multiple of the stage's replicas: `PerStage.sizes_of`.
2. Memory with the samples in flight that sizes and k ask for, `required_in_flight`: `PerStage.plan`.

A bound for unequal micro-batches (`PerStage.bound_s`): at every stage its micro-batches, and the update or the way to it and back.
On the way in a stage waits for as many forwards of its predecessor as its first micro-batch has samples of. Its
micro-batches take their time, or as many round trips to the farthest sink as its samples in flight force one after the other.

Complexity: a round bounds O(S (B + S)) neighbours; simulations end at `MOST_SIMULATIONS` and `MOST_PASSES`, whatever the graph.

Departures: the paper's dynamic program has b and k as dimensions of its state; here they are a search after it. Uniform plans
that do not fit are not starting points: what fits with unequal micro-batches only is not found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from gpp.cost.stage import finish_s, stage_bytes
from gpp.errors import InvalidPlan, MalformedProgram
from gpp.graph.op_graph import bits
from gpp.plan.plan import Plan
from gpp.planners.common.incumbent import MARGIN, Incumbent
from gpp.planners.common.local_search import Hill, climb
from gpp.planners.common.moves import Around, Point, adjacent, boundaries, heads

KS = (1, 2, 4)
"""k that are tried, beside those that balance the stages' turn-over."""

STARTS = 4
"""Uniform plans, the best ones of their micro-batch sizes."""

MOST_COMBINATIONS = 300
"""Combinations of sizes up to which all of a plan's are tried."""

MOST_SIMULATIONS, MOST_PASSES = 240, 150_000
"""Simulations of one search, and passes of all stages in all of them."""

PATIENCE = 12
"""Simulations without a better plan that end a round."""


def vary(incumbent: Incumbent) -> None:
    """Find plans of unequal micro-batches or ks that are faster than the incumbent's best."""
    if incumbent.best is None:
        return
    hill = PerStage(incumbent)
    for plan, seconds in incumbent.best_by_size()[:STARTS]:
        climb(hill, [(Point.of(plan, incumbent.assessor.graph), seconds)], patience=PATIENCE)


@final
class PerStage(Hill[Point]):
    """Plans whose stages may differ in micro-batch size and k, each predicted once, and what is left of the budget."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent, self.assessor = incumbent, incumbent.assessor
        self.problem, self.costs = incumbent.assessor.problem, incumbent.assessor.costs
        self.simulated = self.passes = 0
        self._seen: set[Point] = set()
        self._plans: dict[Point, Plan] = {}

    def neighbours(self, state: Point, below_s: float) -> Iterator[tuple[float, Point]]:
        self._plans.clear()
        for other in dict.fromkeys(self._neighbours(state)):
            if other in self._seen:
                continue
            plan = self.plan(other)
            if plan is not None and (bound := self.bound_s(plan)) < below_s * MARGIN:
                self._plans[other] = plan
                yield bound, other

    def seconds(self, state: Point, below_s: float) -> float | None:
        plan = self._plans[state]
        if state in self._seen or not self._affordable(plan):
            return None
        self._seen.add(state)
        try:
            return self.incumbent.offer(plan)
        except MalformedProgram:
            return math.inf  # Sizes that do not fit together under the schedule.

    def _affordable(self, plan: Plan) -> bool:
        passes = sum(2 * plan.minibatch_size // stage.microbatch_size * len(stage.devices) for stage in plan.stages)
        if self.simulated >= MOST_SIMULATIONS or self.passes + passes > MOST_PASSES:
            return False
        self.simulated, self.passes = self.simulated + 1, self.passes + passes
        return True

    def plan(self, state: Point) -> Plan | None:
        """None if there is a cycle, or too little memory."""
        try:
            plan = state.plan(self.problem, self.incumbent.planner)
        except InvalidPlan:
            return None
        devices = self.problem.cluster.devices
        for stage in plan.stages:
            need = stage_bytes(self.problem, stage).peak(stage.ahead)
            if need > min(devices[d].memory_bytes for d in stage.devices):
                return None
        return plan

    def _neighbours(self, state: Point) -> Iterator[Point]:
        choices = [self.sizes_of(r) for _, r in state.parts]
        if math.prod(len(sizes) for sizes in choices) <= MOST_COMBINATIONS:
            for sizes in itertools.product(*choices):
                yield from _with_ks(replace(state, sizes=sizes))
        groups = self._groups(state)
        for group in groups:
            for step in (-2, -1, 1, 2):
                yield from _with_ks(replace(state, sizes=self._stepped(state, choices, group, step)))
            for k in KS:
                yield replace(state, ks=tuple(k if s in group else old for s, old in enumerate(state.ks)))
        around = Around(assessor=self.assessor, hot=frozenset(range(len(state.parts))))
        for moved in boundaries(around, state):
            if all(self.assessor.graph.is_convex(mask) for mask, _ in moved.parts):
                yield moved
        yield from self._splits(state)

    def _splits(self, state: Point) -> Iterator[Point]:
        """A stage cut in two, one half on an idle device; the halves keep its size or take the next smaller one."""
        assert state.devices is not None
        idle = sorted(set(range(self.assessor.cluster.num_devices)).difference(*state.devices))
        if not idle:
            return

        def with_two(values: tuple, s: int, first: object, second: object) -> tuple:
            return (*values[:s], first, second, *values[s + 1 :])

        for s, (mask, r) in enumerate(state.parts):
            b = state.sizes[s]
            smaller = {r: [x for x in self.sizes_of(r) if x <= b][-2:] for r in {1, r}}
            for head in heads(mask):
                for devices in ((state.devices[s], (idle[0],)), ((idle[0],), state.devices[s])):
                    parts = with_two(state.parts, s, (head, len(devices[0])), (mask ^ head, len(devices[1])))
                    other = replace(state, parts=parts, devices=with_two(state.devices, s, *devices))
                    for first, second in itertools.product(*(smaller[len(d)] for d in devices)):
                        sizes = with_two(state.sizes, s, first, second)
                        yield replace(other, sizes=sizes, ks=(1,) * len(sizes))
                        # What lies before may have to keep less, too.
                        lower = tuple(min(size, first) if t < s and size % first == 0 else size for t, size in enumerate(sizes))
                        if all(size % n == 0 for size, (_, n) in zip(lower, parts, strict=True)):
                            yield replace(other, sizes=lower, ks=(1,) * len(sizes))

    def sizes_of(self, num_replicas: int) -> list[int]:
        """Micro-batch sizes that a stage may have."""
        return [b for b in self.costs.microbatch_sizes if b % num_replicas == 0]

    @staticmethod
    def _stepped(state: Point, choices: list[list[int]], group: frozenset[int], step: int) -> tuple[int, ...]:
        out = list(state.sizes)
        for s in group:
            at = choices[s].index(out[s]) + step
            out[s] = choices[s][min(max(at, 0), len(choices[s]) - 1)]
        return tuple(out)

    def _groups(self, state: Point) -> list[frozenset[int]]:
        """Single stages, those that are alike, those before and behind each."""
        count, graph = len(state.parts), self.assessor.graph
        alike: dict[object, set[int]] = {}
        behind = [{s} for s in range(count)]
        before = [{s} for s in range(count)]
        for s, (mask, r) in enumerate(state.parts):
            b, devices = state.sizes[s], (state.devices or ())[s]
            ops = tuple(bits(mask))
            key = r, b, self.problem.stage_times(ops, b, devices), self.problem.amounts(mask)
            alike.setdefault(key, set()).add(s)
        edges = list(adjacent(graph, list(state.parts), state.chain))
        for p, q in reversed(edges):
            behind[p] |= behind[q]
        for p, q in sorted(edges, key=lambda edge: edge[1]):
            before[q] |= before[p]
        every = [{s} for s in range(count)] + list(alike.values()) + behind + before
        return list(dict.fromkeys(frozenset(group) for group in every if group))

    def bound_s(self, plan: Plan) -> float:
        """No iteration of the plan is shorter, under a schedule that keeps to its samples in flight."""
        problem, stages = self.problem, plan.stages
        times = [problem.stage_times(stage.ops, stage.microbatch_size, stage.devices) for stage in stages]
        back = plan.returning(self.assessor.graph)
        count = len(stages)
        way, trip, out = [0.0] * count, [0.0] * count, 0.0
        for s in reversed(range(count)):
            trip[s] = sum(times[s]) + max((trip[t] for t in plan.successors[s] if (s, t) in back), default=0.0)
        for s, stage in enumerate(stages):
            forward, backward = times[s]
            micro = plan.minibatch_size // stage.microbatch_size
            held = max(stage.in_flight // stage.microbatch_size, 1)
            busy = max(micro * (forward + backward), micro // held * trip[s])
            finish = finish_s(problem, problem.trainable_bytes(stage.ops), stage.devices)
            out = max(out, busy + max(way[s], finish))
            for t in plan.successors[s]:
                # A micro-batch of t is made of so many of this stage's, which follow its last backward too.
                parts = -(-stages[t].microbatch_size // stage.microbatch_size)
                if (s, t) in back:
                    way[t] = max(way[t], max(way[s], finish) + parts * (forward + backward))
        return out


def _with_ks(state: Point) -> Iterator[Point]:
    """With the ks that it has, with 1, and with those by which all stages turn over as many samples at a time."""
    yield state
    if len(set(state.sizes)) > 1:
        yield replace(state, ks=(1,) * len(state.ks))
        most = max(state.sizes)
        yield replace(state, ks=tuple(most // b if most % b == 0 else 1 for b in state.sizes))
