"""A planner of your own, in one file: it cuts the slowest stage in two until every device has one.

A cut lies near the middle of the stage's time, where the fewest bytes cross it: between two branches, if there are any. Edges
between stages follow from the graph (`make_plan`), so branches run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, final

from pydantic import Field

from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.settings import settings


@final
@settings("strategy.planner")
class SplitSlowest(AbstractPlanner):
    """One stage for each device, at the micro-batch size that is predicted to be fastest.

    Args:
        slack: the share of a stage's time by which a cut may be away from its middle.
    """

    slack: Annotated[float, Field(ge=0, lt=0.5)] = 0.25

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        graph, times = problem.graph, problem.op_times(1, 0)
        seconds = [float(s) for s in times.forward_s + times.backward_s]
        stages = [graph.all_mask]  # a set of operators is a number, in which bit i stands for operator i
        while len(stages) < min(problem.cluster.num_devices, graph.num_ops):
            slowest = max((ops for ops in stages if ops.bit_count() > 1), key=lambda ops: sum(seconds[op] for op in bits(ops)))
            stages.remove(slowest)
            stages += self.cut(graph, slowest, seconds)
        parts = [(ops, 1) for ops in stages]
        plans = [make_plan(problem, self.name, parts, size) for size in problem.microbatch_sizes()]
        return min(plans, key=lambda plan: predict(plan).metrics.iteration_s)

    def cut(self, graph: OpGraph, ops: int, seconds: Sequence[float]) -> tuple[int, int]:
        """Two parts of a stage. The first needs nothing of the second: operators are numbered in a topological order."""
        order = list(bits(ops))
        ends = list(accumulate(seconds[op] for op in order))
        halves = [(mask_of(order[:i]), mask_of(order[i:])) for i in range(1, len(order))]
        missed = {pair: abs(end - ends[-1] / 2) for pair, end in zip(halves, ends, strict=False)}
        near = [pair for pair in halves if missed[pair] <= self.slack * ends[-1]] or [min(halves, key=missed.__getitem__)]
        return min(near, key=lambda pair: (crossing_bytes(graph, *pair), missed[pair]))


def crossing_bytes(graph: OpGraph, first: int, second: int) -> float:
    """Bytes of a sample that operators of `first` make and operators of `second` read."""
    crossing = (t for t in graph.tensors if first >> t.producer & 1 and second & mask_of(t.consumers))
    return sum(tensor.bytes_per_sample for tensor in crossing)
