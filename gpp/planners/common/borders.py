"""vPipe's moves from a given plan: operators go over the borders of its stages, which keep their devices.

Search: a pass makes tentative moves of operators over the borders of the stage graph: the best one over any border, better or not,
which is locked then, until all borders are. The best prefix of the pass is kept, and passes go on until one gains nothing, as in
vPipe's planner, whose blocks are operators here and whose borders may be those of any stage graph.

Objective of a pass: seconds that the busiest device computes in a step, then the sum of squares over the devices. Messages are not
in it. Where the caller predicts every partition on the way, as `gpp.app.moving` does, a border that moved to a wide tensor loses.

Constraints:
1. Stages stay in their order, not empty, with their devices, micro-batch sizes, k and turns.
2. What fits is asked by the caller.

Complexity: a pass of B borders judges O(B^2 (FEW_OPS + log n)) partitions, each with two stages to time anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from gpp.cost.problem import Problem
from gpp.graph.op_graph import bits
from gpp.plan.plan import Plan
from gpp.planners.common.moves import FEW_OPS, Point, adjacent, border_moves


@final
class Borders:
    """The search from a plan.

    Args:
        problem: with the strategy's regime, and devices at the speeds that are to be planned for.
    """

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self._plan, self._problem, self._graph = plan, problem, problem.graph
        self._start = Point.of(plan, problem.graph)
        self._seconds: dict[tuple[int, int], float] = {}
        self._ranks: dict[Point, tuple[float, float]] = {}

    def on_the_way(self) -> Iterator[Plan]:
        """Every partition that a pass goes through, in order; better ones come in every pass but the last."""
        here = self._start
        while True:
            way = self._pass(here)
            yield from (self.plan(point) for point in way)
            best = min(way, key=self._rank, default=here)
            if self._rank(best) >= self._rank(here):
                return
            here = best

    def plan(self, point: Point) -> Plan:
        """The plan with other operators in its stages."""
        made = point.plan(self._problem, self._plan.planner, [stage.sharing for stage in self._plan.stages])
        return replace(made, explanation=self._plan.explanation)

    def _pass(self, start: Point) -> list[Point]:
        """The partitions on the way on which every border is crossed once."""
        locked, here, way = set[tuple[int, int]](), start, list[Point]()
        while True:
            borders = [border for border in adjacent(self._graph, here.parts, here.chain) if border not in locked]
            moved = [(self._rank(other), n, border, other) for n, (border, other) in enumerate(self._over(here, borders))]
            if not moved:
                return way
            _, _, border, here = min(moved, key=lambda found: found[:2])
            locked.add(border)
            way.append(here)

    def _over(self, here: Point, borders: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Point]]:
        """Partitions with some operators moved over a border, one way or the other."""
        for p, q in borders:
            for other in dict.fromkeys(border_moves(self._graph, here, p, q, FEW_OPS)):
                if self._in_order(other):
                    yield (p, q), other

    def _in_order(self, point: Point) -> bool:
        """Whether every operator reads from its own stage and earlier ones. If so, no path comes back to a stage."""
        below = 0
        for mask, _ in point.parts:
            below |= mask
            if any(self._graph.predecessors[op] & ~below for op in bits(mask)):
                return False
        return True

    def _rank(self, point: Point) -> tuple[float, float]:
        """Seconds of the busiest device, then the sum of squares."""
        if point not in self._ranks:
            load = dict[int, float]()
            for s, (mask, _) in enumerate(point.parts):
                for device in self._plan.stages[s].devices:
                    load[device] = load.get(device, 0.0) + self._stage_s(s, mask)
            self._ranks[point] = max(load.values()), sum(own * own for own in load.values())
        return self._ranks[point]

    def _stage_s(self, s: int, mask: int) -> float:
        """Seconds of the passes of a stage on each of its devices, in a step."""
        if (s, mask) not in self._seconds:
            stage = self._plan.stages[s]
            ops = tuple(bits(mask))
            passes = self._problem.stage_times(ops, stage.microbatch_size, stage.devices, stride=stage.stride)
            self._seconds[s, mask] = sum(passes) * -(-self._plan.minibatch_size // stage.microbatch_size) / stage.stride
        return self._seconds[s, mask]


def same_stages(first: Plan, second: Plan) -> bool:
    """Whether two plans have the same operators in every stage."""
    return [stage.ops for stage in first.stages] == [stage.ops for stage in second.stages]
