"""How a run's steps fall into stretches: between two of them the pipeline is empty.

A program that drains makes a stretch of every step. One that does not drains before an evaluation, before a checkpoint
if that is asked for, where another plan may take over, and at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpp.runtime.job import Job


def stretch_at(job: Job, step: int) -> tuple[int, int]:
    """First step and number of steps of the stretch that `step` belongs to."""
    settings = job.settings
    if not job.streams:
        return step, 1
    every = [settings.evaluate_every] if job.evaluation else []
    every += [settings.checkpoint_every] if settings.checkpoint_drain else []
    every += [settings.replan_every]
    first, stop = settings.first_step, settings.steps
    for period in every:
        if period:
            first = max(first, step // period * period)
            stop = min(stop, (step // period + 1) * period)
    return first, stop - first
