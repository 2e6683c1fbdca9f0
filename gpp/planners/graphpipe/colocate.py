"""Devices that hold two stages, so that a branch need not wait for the join it shares a device with.

A stage starts when all that it receives is there. A stage that holds a branch and the join behind it therefore runs its branch
after the other branches, although the branch needs nothing from them. Cut into what depends on nothing received and the rest, on
the same device, the branches run side by side, and gradients go back to the others as soon as the join has made them.

Source: none; the GraphPipe paper gives every stage devices of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import Predict
from gpp.planners.common.local_search import Hill, climb

WORTH = 1e-3
"""Relative gain below which a device keeps one stage: another stage is another action to dispatch."""


def split_stages(plan: Plan, problem: Problem, predict: Predict) -> Plan:
    """The plan with stages cut in two on their own devices as long as its predicted step gets shorter.

    Complexity: at most a prediction for each stage and each stage cut.
    """
    best, _ = climb(_Cuts(problem, predict), [(plan, predict(plan).metrics.iteration_s)], margin=1 - WORTH)
    return best


@final
@dataclass(frozen=True, slots=True)
class _Cuts(Hill[Plan]):
    """Plans with one more stage cut in two, without a bound on what that may gain."""

    problem: Problem
    predict: Predict

    def neighbours(self, state: Plan, below_s: float) -> Iterator[tuple[float, Plan]]:
        for s in range(len(state.stages)):
            cut = _cut(state, s, self.problem)
            if cut is not None:
                yield 0.0, cut

    def seconds(self, state: Plan, below_s: float) -> float | None:
        return self.predict(state).metrics.iteration_s


def _cut(plan: Plan, s: int, problem: Problem) -> Plan | None:
    """`plan` with stage `s` cut into what needs nothing from other stages and the rest; None if there is no such cut."""
    stage = plan.stages[s]
    own = mask_of(stage.ops)
    free = independent(problem.graph, own)
    if free in (0, own) or stage.recompute or stage.tensor_parallel > 1:
        return None
    parts, sizes, ks, where = [], [], [], []
    for t, other in enumerate(plan.stages):
        for mask in (free, own & ~free) if t == s else (mask_of(other.ops),):
            parts.append((mask, len(other.devices)))
            sizes.append(other.microbatch_size)
            ks.append(other.k)
            where.append(other.devices)
    try:
        cut = make_plan(problem, plan.planner, parts, sizes, k=ks, placement=where, ordered=True, explanation=plan.explanation)
        cut.validate(problem)
    except (Infeasible, InvalidPlan):
        return None
    return cut


def independent(graph: OpGraph, mask: int) -> int:
    """The operators of a set that depend on none outside it."""
    return mask_of([op for op in bits(mask) if not graph.ancestors[op] & ~mask])
