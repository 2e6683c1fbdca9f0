"""Why nothing fits, and the smallest change that would."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, counted
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.plan import Plan
from gpp.planners.common.candidates import Assessor, Candidate, Shortage
from gpp.planners.common.stage_costs import StageCosts

Found = TypeVar("Found")

Attempt = Callable[[Problem], Candidate | None]
"""problem -> some candidate that fits, or None."""

DIGITS = 4
"""Of the memory that is named, rounded up."""

PRECISION, MARKED_PRECISION = 1.005, 1.02
"""Memory is searched up to these factors: the second where every attempt also asks how operators run."""


def explain(problem: Problem, attempt: Attempt) -> Infeasible:
    """The exception to raise. Once read, it names the stage that lacks most in the plan that needs least memory.

    Args:
        attempt: the planner's own test, so that the memory named is one with which it finds a plan.
    """
    return Infeasible.later(_nothing_fits(problem), lambda: _explained(problem, attempt))


def _nothing_fits(problem: Problem) -> str:
    return f"no plan found fits the {_bytes(problem.memory_limit_bytes)} of a device"


def explain_marked(problem: Problem, plan: Callable[[Problem], Plan], refused: Infeasible, said: str) -> Infeasible:
    """The exception of `explain`, where what a plan takes is known of it as a whole: it has marks, or values of a mechanism.

    Args:
        plan: problem -> some plan that fits; raises Infeasible.
        refused: what was refused, for where no memory would do.
        said: the words that say that nothing fits.
    """

    def attempt(asked: Problem) -> Plan | None:
        with suppress(Infeasible):
            return plan(asked)
        return None

    def find() -> Infeasible:
        have = problem.memory_limit_bytes
        least = _least_memory(problem, attempt, MARKED_PRECISION)
        if least is None:
            return refused
        high, found = least
        needs = found.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(found.stages)})
        most = max(needs, key=lambda device: needs[device])
        ops = mask_of(op for s in found.stages_of_device[most] for op in found.stages[s].ops)
        constraint = (
            f"{said}: the plan found that needs least memory ({counted(len(found.stages), 'stage')}, micro-batch "
            f"{max(stage.microbatch_size for stage in found.stages)}) takes {_bytes(needs[most])} for the stage of "
            f"{ops_text(problem.graph, ops)}, and a device has {_bytes(have)}"
        )
        return Infeasible(constraint, _remedy(problem, have * high, attempt))

    return Infeasible.later(said, find)


def _least_memory(problem: Problem, attempt: Callable[[Problem], Found | None], precision: float) -> tuple[float, Found] | None:
    """The least factor on the memory of every device with which something is found, to a precision, and what; None for none."""
    have = problem.memory_limit_bytes
    low, high, fits = 1.0, 1.0, None
    while fits is None and (high < 2.0**20 or have * high < 2.0**60):
        low, high = high, high * 2
        fits = attempt(_with_memory(problem, have * high))
    if fits is None:
        return None
    while high > low * precision:
        middle = (low * high) ** 0.5
        found = attempt(_with_memory(problem, have * middle))
        if found is None:
            low = middle
        else:
            high, fits = middle, found
    return high, fits


def _explained(problem: Problem, attempt: Attempt) -> Infeasible:
    have = problem.memory_limit_bytes
    least = _least_memory(problem, attempt, PRECISION)
    if least is None:
        return Infeasible("no plan satisfies the planner's constraints at any memory", "use another planner")
    high, fits = least
    shortage = Assessor(StageCosts(problem)).assess(fits.parts, fits.microbatch_size, chain=fits.chain)
    constraint = f"{_nothing_fits(problem)}: even the one that needs least memory"
    if isinstance(shortage, Shortage):
        lack = shortage.need_bytes - shortage.have_bytes
        constraint += (
            f" ({counted(len(fits.parts), 'stage')}, micro-batch {fits.microbatch_size}) lacks {_bytes(lack)} for the stage of "
            f"{ops_text(problem.graph, shortage.mask)}, which needs {_bytes(shortage.need_bytes)}"
        )
    return Infeasible(constraint, _remedy(problem, have * high, attempt))


def _remedy(problem: Problem, memory_bytes: float, attempt: Callable[[Problem], object | None]) -> str:
    """The words of a remedy: so much memory, or a smaller micro-batch with which a plan is found."""
    named = _rounded_up(memory_bytes)
    remedy = f"{_bytes(named)} on every device (cluster.memory_bytes={named:.{DIGITS}g})"
    # A model that runs at one batch size only has no other one.
    sizes = problem.microbatch_size is not None and problem.max_replicas != 1
    if sizes and (b := _smaller_microbatch(problem, attempt)) is not None:
        remedy += f", or microbatch_size={b}"
    return remedy


def _with_memory(problem: Problem, memory_bytes: float) -> Problem:
    """The problem with at least so much memory on every device."""
    devices = tuple(replace(device, memory_bytes=max(device.memory_bytes, memory_bytes)) for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def _rounded_up(amount: float) -> float:
    """The number, rounded up to `DIGITS` digits."""
    unit = 10.0 ** (math.floor(math.log10(amount)) + 1 - DIGITS)
    return math.ceil(amount / unit) * unit


def _smaller_microbatch(problem: Problem, attempt: Callable[[Problem], object | None]) -> int | None:
    """The largest size below the imposed one with which the planner finds a plan."""
    imposed, minibatch = problem.microbatch_size or 1, problem.minibatch_size // problem.regime.minibatches
    for b in range(imposed - 1, 0, -1):
        if minibatch % b == 0 and attempt(replace(problem, microbatch_size=b)) is not None:
            return b
    return None


def ops_text(graph: OpGraph, mask: int) -> str:
    """A stage's operators for a message: one name, or the first and the last."""
    names = [graph.ops[op].name for op in bits(mask)]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} operators)"


def _bytes(amount: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} B"
