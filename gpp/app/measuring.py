"""What a run has gained, measured after it: its plan, the best chain and one device take turns on the same workers.

A rehearsal's process forks the workers of all three, so they have the same runtime, the same channels and the same weights, and the
rounds alternate, so they have the same neighbours on the machine.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpp.analysis.gains import ONE_DEVICE, Gains, Rival, gain_of_rounds, predicted_gains
from gpp.errors import GppError, WorkerFailed
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job, WritesItself
from gpp.runtime.rehearsal.rehearse import UNTIMED, Rehearsals, short
from gpp.timeline import Metrics

ROUNDS, FEWEST_ROUNDS = 3, 2
"""Turns of each plan, and those of plans whose steps are long; with one nobody would see whether a difference is one."""

TURN_S = 0.8
"""Seconds that the steps of a turn take together, as predicted."""

FEWEST, MOST = UNTIMED + 3, 60
"""Steps of a turn. Long steps may be fewer, down to one that counts."""


def turns_within(budget_s: float, step_s: float) -> tuple[int, int] | None:
    """(turns, fewest steps of a turn) that fit into a budget: rather short turns than few; None where not even two do.

    Args:
        step_s: seconds of one step of every plan together.

    >>> turns_within(15.0, 0.5), turns_within(15.0, 1.6), turns_within(15.0, 2.0), turns_within(15.0, 3.0)
    ((3, 5), (3, 3), (2, 3), None)
    """
    choices = ((turns, steps) for turns in (ROUNDS, FEWEST_ROUNDS) for steps in range(FEWEST, UNTIMED, -1))
    return next(((turns, steps) for turns, steps in choices if turns * steps * step_s <= budget_s), None)


def measured_gains(
    rivals: tuple[Rival, ...],
    own: Job,
    predicted: Metrics,
    job_of: Callable[[Rival], Job],
    weights: Callable[[], Mapping[str, Any] | WritesItself],
    *,
    rehearsals: Rehearsals,
    budget_s: float,
    progress: Progress,
) -> Gains:
    """The gains of a run's plan: measured in as many turns as `budget_s` allows, or predicted where it allows less than two.

    Args:
        own: the job that has run.
        job_of: the job of a rival, over the same model, data and settings.
        weights: initial weights by full name.
        rehearsals: closed afterwards; they may have been started before.
        progress: is told what is being measured, and why nothing was.
    """
    foreseen = predicted_gains(rivals, own.plan, predicted)
    others = [rival for rival in rivals if rival.plan is not None and not rival.same]
    step_s = {None: predicted.iteration_s, **{rival.name: rival.predicted_s for rival in others}}
    if not others:
        return foreseen
    all_s = sum(step_s.values())
    if (within := turns_within(budget_s, all_s)) is None:
        least_s = FEWEST_ROUNDS * (UNTIMED + 1) * all_s
        progress.warn(
            f"what was gained is predicted: {FEWEST_ROUNDS} turns of {UNTIMED + 1} steps of each plan take {least_s:.0f} s, and "
            f"baselines_s is {budget_s:g}; baselines_s={math.ceil(least_s)} measures it"
        )
        return foreseen
    turns, fewest = within
    steps = {name: min(MOST, max(fewest, math.ceil(TURN_S / max(seconds, 1e-6)))) for name, seconds in step_s.items()}
    found: dict[str | None, list[float]] = {name: [] for name in step_s}
    taken = list[float]()
    try:
        jobs = {None: own, **{rival.name: job_of(rival) for rival in others}}
        jobs = {name: short(job, steps[name]) for name, job in jobs.items()}
        initial = weights()
        with rehearsals:
            begin, turn = time.perf_counter(), 0
            # Steps may take longer than predicted: then there are fewer turns.
            while turn < FEWEST_ROUNDS or (turn < turns and (time.perf_counter() - begin) * (turn + 1) <= turn * budget_s):
                turn += 1
                progress.say(f"measuring the best chain and one device, turn {turn} of {turns} ...")
                for name, job in jobs.items():
                    devices = rehearsals.run(job, initial, predicted_s=step_s[name])
                    found[name].append(max(device.step_s for device in devices))
                    if name == ONE_DEVICE:
                        taken.append(devices[0].waited_s / devices[0].step_s)
    except (WorkerFailed, GppError) as error:
        progress.warn(f"what was gained is predicted, because it could not be measured: {error}")
        return foreseen
    own_s, by_name = found.pop(None), {rival.name: rival for rival in others}
    measured = {name: gain_of_rounds(by_name[str(name)], own_s, seconds) for name, seconds in found.items()}
    return replace(
        foreseen,
        gains=tuple(replace(measured.get(gain.over, gain), foreseen=gain.foreseen) for gain in foreseen.gains),
        measured=True,
        rounds=len(own_s),
        steps=min(job.settings.steps for job in jobs.values()) - UNTIMED,
        taken=statistics.median(taken) if taken else None,
        workers=len(own.program.actions),
        cores=len(os.sched_getaffinity(0)) if own.settings.device_kind == "cpu" else 0,
    )
