"""Operators that go over a stage's border by hand, one by name or several as the border is drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, InvalidPlan, counted
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.loss_stage import with_loss_apart
from gpp.plan.plan import Plan
from gpp.planners.common.moves import Point
from gpp.strategy import Strategy

BY_HAND = "Moved by hand:"


class OperatorMove(NamedTuple):
    """An operator, and the stage to which it goes."""

    op: int
    to: int


class BorderShift(NamedTuple):
    """How many operators go from a stage to one beside it."""

    source: int
    to: int
    number: int


class EditedPlan(NamedTuple):
    """A plan after a change by hand, and what has changed in words."""

    plan: Plan
    change: str


def moves(plan: Plan, graph: OpGraph) -> list[list[OperatorMove]]:
    """For each stage the moves of one operator to a stage beside it, after which stages stay in their order and none is empty.

    An operator may go where what it reads is made no later, and what reads it comes no earlier: then no path comes back to a stage.
    """
    out = list[list[OperatorMove]]()
    for s, stage in enumerate(plan.stages):
        beside = sorted({*plan.predecessors[s], *plan.successors[s]}) if len(stage.ops) > 1 else ()
        out.append([OperatorMove(op, t) for op in stage.ops for t in beside if _may_go(op, t, plan.stage_of_op, graph)])
    return out


def _may_go(op: int, to: int, stage_of: Mapping[int, int], graph: OpGraph) -> bool:
    """Whether an operator may go to a stage beside its own."""
    before, behind = bits(graph.predecessors[op]), bits(graph.successors[op])
    return all(stage_of[other] <= to for other in before) and all(stage_of[other] >= to for other in behind)


def moved(plan: Plan, problem: Problem, strategy: Strategy, move: OperatorMove) -> EditedPlan:
    """The plan with an operator in a stage beside its own; stages keep their devices and sizes, and fit as the strategy has them.

    Raises:
        InvalidConfig: there is no such operator, or it may not go there.
        InvalidPlan: the plan is none for this problem.
    """
    graph = problem.graph
    plan.check_stages(graph, problem.cluster.num_devices)
    found = next((s for s, own in enumerate(moves(plan, graph)) if move in own), None)
    if found is None:
        rule = "must be an operator and a stage beside its own that it may go to"
        raise InvalidConfig("move", list(move), rule, "take one of those that the page offers")
    return _changed(plan, problem, strategy, found, move.to, [move.op])


def shifted(plan: Plan, problem: Problem, strategy: Strategy, shift: BorderShift) -> EditedPlan:
    """The plan with the border between two stages elsewhere; as `moved`.

    The operators that go are those nearest to the border, one after another, as far as each may go and one stays.

    Raises:
        InvalidConfig: no operator of the one stage may go to the other.
        InvalidPlan: the plan is none for this problem.
    """
    graph, (source, to, number) = problem.graph, shift
    plan.check_stages(graph, problem.cluster.num_devices)
    stages = range(len(plan.stages))
    beside = source in stages and to in {*plan.predecessors[source], *plan.successors[source]}
    stage_of = dict(plan.stage_of_op)
    left, gone = set(plan.stages[source].ops) if beside else set[int](), list[int]()

    while len(left) > 1 and len(gone) < number and (free := [op for op in left if _may_go(op, to, stage_of, graph)]):
        op = max(free) if to > source else min(free)
        left.remove(op)
        gone.append(op)
        stage_of[op] = to
    if not gone:
        raise InvalidConfig("shift", list(shift), "must name two stages with a border that operators may cross", "drag another one")
    return _changed(plan, problem, strategy, source, to, gone)


def _changed(plan: Plan, problem: Problem, strategy: Strategy, source: int, to: int, ops: Collection[int]) -> EditedPlan:
    posed, graph = strategy.posed(problem), problem.graph
    point, mask = Point.of(plan, graph), mask_of(ops)
    changed = {source: -mask, to: mask}
    parts = tuple((mask + changed.get(s, 0), count) for s, (mask, count) in enumerate(point.parts))
    named = graph.ops[next(iter(ops))].name if len(ops) == 1 else counted(len(ops), "operator")
    said = [words for words in plan.explanation if words.startswith(BY_HAND)]
    said.append(f"{BY_HAND} {named} from s{source} to s{to}.")
    made = replace(point, parts=parts).plan(posed, plan.planner, [stage.sharing for stage in plan.stages])
    made = with_loss_apart(replace(made, explanation=tuple(said)), posed)

    def step_s(one: Plan, problem: Problem = posed) -> float:
        return strategy.predict(one, problem, record=False).metrics.iteration_s

    fitting = strategy.sparing.fastest(made, posed, step_s)
    if fitting is None:
        raise InvalidPlan("the changed plan does not fit the devices' memory. Fix: take the move back, or give more memory")
    return EditedPlan(fitting, f"{named} in stage {to} in place of stage {source}")
