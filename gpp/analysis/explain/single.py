"""Single changes to a chain of stages: some operators from one stage to another, or other micro-batches; each simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from gpp.analysis.explain.changes import with_other_microbatches
from gpp.analysis.explain.what_if import WhatIf
from gpp.cost.problem import Problem
from gpp.errors import GppError
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.strategy import Strategy

SHOWN = 3
"""Changes that are told: those that help most."""
MOVED = 2
"""Operators that move at once, at most."""
ROUNDING = 1e-9
"""Share of a number by which sums in another order may be above it."""
GIVERS = 3
"""Stages that others relieve: those with the largest load."""


def single_changes(
    plan: Plan, iteration_s: float, problem: Problem, strategy: Strategy, loads: Sequence[float]
) -> tuple[tuple[WhatIf, Plan], ...]:
    """The changes that help most, best first, each with the plan that it makes; none where no change helps.

    Args:
        loads: seconds of each stage, by which those are chosen that others relieve.
    """
    found: list[tuple[float, str, Plan]] = []
    # An order of hundreds of micro-batches takes long to find, and most changes cannot be among the best, whatever their order.
    tried = sorted(
        ((least_s(made, problem, strategy), words, made) for words, made in changes(plan, problem, loads)), key=lambda one: one[:2]
    )
    for least, words, changed in tried:
        if least * (1 - ROUNDING) > min(iteration_s, _last_shown(found)):
            break
        try:
            strategy.check(changed, problem)
            seconds = strategy.predict(changed, problem, record=False).metrics.iteration_s
        except GppError:
            continue
        if 0 < seconds < iteration_s:
            found.append((seconds, words, changed))
    best = sorted(found, key=lambda one: one[:2])[:SHOWN]
    return tuple((WhatIf.of(words, "simulated", made, seconds, iteration_s), made) for seconds, words, made in best)


def least_s(plan: Plan, problem: Problem, strategy: Strategy) -> float:
    """Seconds of a step below which no order of its passes comes: a device has all its own passes; and, between the last one and
    the first one of the next step, an update, or in a chain that drains the way from its first stage to the beginning and back."""
    bills = plan.bills(strategy.posed(problem))
    chain = strategy.schedule.drains and all((s, s + 1) in plan.edges for s in range(len(plan.stages) - 1))
    trips = [0.0, *accumulate(bill.forward_s + bill.backward_s - bill.weight_s if chain else 0.0 for bill in bills)]
    least = 0.0
    for stages in plan.stages_of_device.values():
        busy_s = 0.0
        for s in stages:
            stage, bill = plan.stages[s], bills[s]
            whole = plan.minibatch_size // stage.microbatch_size // stage.stride
            busy_s += whole * (bill.forward_s + bill.backward_s)
        least = max(least, busy_s + max(trips[min(stages)], sum(bills[s].update_s for s in stages)))
    return least


def _last_shown(found: Sequence[tuple[float, str, Plan]]) -> float:
    """Seconds of the last change that would be told."""
    return sorted(seconds for seconds, *_ in found)[SHOWN - 1] if len(found) >= SHOWN else math.inf


def changes(plan: Plan, problem: Problem, loads: Sequence[float]) -> Iterator[tuple[str, Plan]]:
    """All single changes, with what they are."""
    count = len(plan.stages)
    givers = sorted(range(count), key=lambda s: (-loads[s], s))[:GIVERS]
    whole = all(not stage.mechanisms for stage in plan.stages)
    for giver in givers if whole else ():
        for taker in range(count):
            for moved in range(1, MOVED + 1):
                if (changed := _shifted(plan, problem, giver, taker, moved)) is not None:
                    yield changed
    yield from with_other_microbatches(plan, problem)


def _shifted(plan: Plan, problem: Problem, giver: int, taker: int, moved: int) -> tuple[str, Plan] | None:
    """The chain in which one stage has `moved` operators less and another as many more, all boundaries between shifted; None
    where a stage would have none left, or the stages would be no chain."""
    if giver == taker:
        return None
    parts, names = [list(stage.ops) for stage in plan.stages], [op.name for op in problem.graph.ops]
    if len(parts[giver]) <= moved:
        return None
    step = 1 if taker > giver else -1
    for s in range(giver, taker, step):
        if len(parts[s]) < moved:
            return None
        if step > 0:
            parts[s], parts[s + 1] = parts[s][:-moved], sorted(parts[s][-moved:] + parts[s + 1])
        else:
            parts[s], parts[s - 1] = parts[s][moved:], sorted(parts[s - 1] + parts[s][:moved])
    if not all(parts):
        return None
    try:
        made = make_plan(
            problem,
            plan.planner,
            [(mask_of(ops), len(stage.devices)) for ops, stage in zip(parts, plan.stages, strict=True)],
            [stage.microbatch_size for stage in plan.stages],
            k=[stage.k for stage in plan.stages],
            chain=True,
            ordered=True,
            placement=[stage.devices for stage in plan.stages],
        )
    except ValueError:
        return None
    ends = plan.stages[giver].ops[-moved:] if step > 0 else plan.stages[giver].ops[:moved]
    what = ", ".join(names[op] for op in ends)
    between = "" if abs(taker - giver) == 1 else f", the stages between handing on as much ({what} leaves s{giver})"
    moved_words = what if not between else f"{moved} operator{'s' * (moved > 1)}"
    return f"move {moved_words} from s{giver} to s{taker}{between}", replace(made, search_s=plan.search_s)
