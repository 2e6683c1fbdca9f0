"""What a run has gained, measured after it: its plan, the best chain and one device take turns on the same workers.

A rehearsal's process forks the workers of all three, so they have the same runtime, the same channels and the same weights, and the
rounds alternate, so they have the same neighbours on the machine.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpp.analysis.gains import ONE_DEVICE, Gains, Rival, gain_of_rounds, predicted_gains
from gpp.errors import GppError, WorkerFailed
from gpp.runtime.job import Job
from gpp.runtime.rehearsal.rehearse import UNTIMED, Rehearsals, short
from gpp.timeline import Metrics

ROUNDS = 3
"""Turns of each plan; with fewer nobody would see whether a difference is one."""

TURN_S = 0.8
"""Seconds that the steps of a turn take together, as predicted."""

FEWEST, MOST = UNTIMED + 3, 60
"""Steps of a turn."""


def measured_gains(
    rivals: tuple[Rival, ...],
    own: Job,
    predicted: Metrics,
    job_of: Callable[[Rival], Job],
    weights: Callable[[], Mapping[str, Any]],
    *,
    rehearsals: Rehearsals,
    budget_s: float,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Gains:
    """The gains of a run's plan: measured, or predicted where the steps alone would take longer than `budget_s`.

    Args:
        own: the job that has run.
        job_of: the job of a rival, over the same model, data and settings.
        weights: initial weights by full name.
        rehearsals: closed afterwards; they may have been started before.
        say: is told what is being measured.
        warn: is told why nothing could be measured.
    """
    foreseen = predicted_gains(rivals, own.plan, predicted)
    others = [rival for rival in rivals if rival.plan is not None and not rival.same]
    step_s = {None: predicted.iteration_s, **{rival.name: rival.predicted_s for rival in others}}
    turn_s = budget_s / ROUNDS
    if not others or turn_s < FEWEST * sum(step_s.values()):
        return foreseen
    steps = {name: min(MOST, max(FEWEST, math.ceil(TURN_S / max(seconds, 1e-6)))) for name, seconds in step_s.items()}
    found: dict[str | None, list[float]] = {name: [] for name in step_s}
    taken = list[float]()
    try:
        jobs = {None: own, **{rival.name: job_of(rival) for rival in others}}
        jobs = {name: short(job, steps[name]) for name, job in jobs.items()}
        initial = weights()
        with rehearsals:
            for turn in range(ROUNDS):
                say(f"measuring the best chain and one device, turn {turn + 1} of {ROUNDS} ...")
                for name, job in jobs.items():
                    devices = rehearsals.run(job, initial, predicted_s=step_s[name])
                    found[name].append(max(device.step_s for device in devices))
                    if name == ONE_DEVICE:
                        taken.append(devices[0].waited_s / devices[0].step_s)
    except (WorkerFailed, GppError) as error:
        warn(f"what was gained is predicted, because it could not be measured: {error}")
        return foreseen
    own_s, by_name = found.pop(None), {rival.name: rival for rival in others}
    measured = {name: gain_of_rounds(by_name[str(name)], own_s, seconds) for name, seconds in found.items()}
    return replace(
        foreseen,
        gains=tuple(replace(measured.get(gain.over, gain), foreseen=gain.foreseen) for gain in foreseen.gains),
        measured=True,
        rounds=ROUNDS,
        steps=min(job.settings.steps for job in jobs.values()) - UNTIMED,
        taken=statistics.median(taken) if taken else None,
        workers=len(own.program.actions),
        cores=len(os.sched_getaffinity(0)) if own.settings.device_kind == "cpu" else 0,
    )
