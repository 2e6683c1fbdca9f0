"""How a stage fits: which operators are kept, computed again, or on the host, for the least added seconds.

* Chains of up to 64 operators: the best of all markings (`gpp.mechanisms.marks.chain`, with its one limit).
* Other stages of up to `SMALL` operators, and those whose operators declare how they are recomputed: the best of all markings by
  branch and bound, up to a number of tried ones (`gpp.mechanisms.marks.search`).
* All others: a heuristic. The stage is solved as if it were a chain in its order, the true bill is asked, and marks are exchanged
  while that helps.

Seconds of computing again are those on the device that the stage waits for; `Judged.added_s` is of the slowest device with its
marks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

from gpp.cost.problem import Problem, Remembered
from gpp.mechanisms.marks.chain import ChainProgram
from gpp.mechanisms.marks.choices import HAIR, Choices, Judged, Marking
from gpp.mechanisms.marks.priced import Selection
from gpp.mechanisms.marks.search import branch_and_bound, capuchin, exchanged
from gpp.stage import Stage

WAYS = ("recompute", "offload")

CHAIN = 64
"""Operators of a chain that is solved exactly."""

SMALL = 10
"""Operators of a stage of any form that is solved exactly."""

GREEDY = 24
"""Operators of a stage that is no chain for which the published greedy is asked as well; it asks for the bill of every step."""


ROOMS, OVER = 6, 1.2
"""How often a stage that is solved as if it were a chain is given less room, and by how much more than it overflows."""

NARROW, NEARLY = 32, 0.02
"""Partial choices for each operator of such a stage, and the share of its seconds that a search is worth."""


ROUGH = 1e6
"""Share from which on a stage of more than `SMALL` operators is solved as if it were a chain, whatever its form."""


def fit(
    problem: Problem,
    stage: Stage,
    held: int,
    limit: float,
    *,
    ways: Collection[str] = WAYS,
    selection: Selection = "least",
    depth: int | None = None,
    again: Collection[int] | None = None,
    within: float = 0.0,
) -> Judged | None:
    """The marks of least added seconds with which a stage fits; None if it fits with none.

    Args:
        stage: its own marks are disregarded.
        held: micro-batches in flight at a time on each of its devices.
        limit: bytes that each of its devices may hold.
        ways: what may be done besides keeping. `offload` is done only where every device of the stage has a link to its host.
        selection: `least` for the least added seconds; `capuchin` for the published greedy (`gpp.mechanisms.marks.search`).
        depth: of the pipeline, for weight policies whose versions depend on it.
        again: operators that may be computed again; None for all.
        within: share by which the seconds of a chain may be above a proven bound, for which it is solved sooner. From `ROUGH` on
            stages of any form are solved sooner; infinite for the first choice that fits.
    """
    key = stage.ops, stage.devices, stage.microbatch_size, stage.devices_per_replica, stage.stride, stage.in_flight
    key += held, limit, frozenset(ways), selection, depth, again if again is None else frozenset(again), within
    known, equal = _FITS.of(problem), _ALIKE.of(problem)
    if key not in known:
        choices = Choices(problem, stage, held, ways, depth, again)
        # Models have equal blocks: what is found for one stretch of them is the answer for all equal ones.
        alike = choices.alike, limit, selection, within
        if alike not in equal:
            found = _fit(choices, limit, selection, within)
            equal[alike] = found and found._replace(marking=found.marking.of(choices.at))
        answer = equal[alike]
        known[key] = answer and answer._replace(marking=answer.marking.of(stage.ops))
    return known[key]


_FITS = Remembered[tuple[object, ...], Judged | None]()
_ALIKE = Remembered[tuple[object, ...], Judged | None]()


def _fit(choices: Choices, limit: float, selection: Selection, within: float) -> Judged | None:
    as_it_is = choices.judge(Marking())
    if as_it_is.fits(limit):
        return as_it_is
    if not choices.recomputes and not choices.offloads:
        return None
    if choices.in_runs and choices.least_peak > limit * (1 + HAIR):
        return None
    found = capuchin(choices, limit) if selection == "capuchin" else _least(choices, limit, within)
    return found and _tidy(choices, limit, found)


def _tidy(choices: Choices, limit: float, found: Judged) -> Judged:
    """The choice without marks of operators that nobody needs again, if it still fits."""
    if not choices.in_runs:
        return found
    again = choices.runs.again(found.marking.recompute, found.marking.boundaries)
    # A boundary that is not computed again holds what it handed on; without its mark it would hold all.
    marking = found.marking._replace(recompute=again, boundaries=tuple(op for op in found.marking.boundaries if op in again))
    tidy = choices.judge(marking)
    return tidy if tidy.fits(limit) and tidy.added_s <= found.added_s else found


def _least(choices: Choices, limit: float, within: float) -> Judged | None:
    n = len(choices.stage.ops)
    if not choices.in_runs:
        start = capuchin(choices, limit)
        return branch_and_bound(choices, limit, start) if n <= SMALL else exchanged(choices, limit, start)
    program = ChainProgram(choices, limit)
    if program.parts.exact and n <= CHAIN:
        marking = program.solve(within)
        return None if marking is None else choices.judge(marking)
    if within >= ROUGH and n > SMALL:
        as_chain, first = partial(_as_chain, choices, limit), program.first_fit
        return (first() or as_chain()) if math.isinf(within) else (as_chain() or first())
    starts = [_as_chain(choices, limit), program.first_fit(), capuchin(choices, limit) if n <= GREEDY else None]
    if n > SMALL:
        return exchanged(choices, limit, *starts)
    return branch_and_bound(choices, limit, min((one for one in starts if one is not None), default=None))


def _as_chain(choices: Choices, limit: float) -> Judged | None:
    """The choice of a chain in the stage's order, with less room until it fits in truth."""
    room = limit
    for _ in range(ROOMS):
        marking = ChainProgram(choices, room, NARROW).solve(NEARLY)
        if marking is None:
            break
        judged = choices.judge(marking)
        if judged.fits(limit):
            return judged
        room -= (judged.peak - limit) * OVER
    return None
