"""Which stages of a job have split backwards, and what these cannot be combined with."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.program.kinds import HALVES
from gpp.runtime.job import Job

WHOLE = "use strategy/schedule=1f1b"


def split_stages(job: Job) -> tuple[int, ...]:
    """The stages whose backwards the job's program has in two halves, ascending."""
    return tuple(sorted({action.stage for own in job.program.actions.values() for action in own if action.kind in HALVES}))


def check_helped(job: Job) -> None:
    """Refuse what helpers cannot be combined with.

    Raises:
        InvalidConfig: names the setting.
    """
    found = next((s for s, stage in enumerate(job.plan.stages) if stage.helpers), None)
    if found is None:
        return
    settings, helpers = job.settings, list(job.plan.stages[found].helpers)
    rule = f"devices {helpers} help stage {found}: "
    if settings.device_kind != "cpu":
        raise InvalidConfig("cluster", job.cluster.name, f"{rule}no proof covers their messages on cards yet", "use cluster=local")
    if settings.autocast:
        why = f"{rule}casts are differentiated with their operators, on the stage's own device"
        raise InvalidConfig("engine.autocast", settings.autocast, why, "set engine.autocast=null")
    if settings.enforce_memory:
        why = f"{rule}what a helper holds is no stage's of its own, by which the limit is set"
        raise InvalidConfig("engine.enforce_memory", True, why, "set engine.enforce_memory=false")
    if settings.checkpoint_every and not settings.checkpoint_drain:
        why = f"{rule}stages of one device have made different numbers of updates while micro-batches are in flight"
        raise InvalidConfig("checkpoint.drain", False, why, "set checkpoint.drain=true")


def check_halves(job: Job) -> None:
    """Refuse split backwards where they cannot be carried out.

    Raises:
        InvalidConfig: stages are compiled.
        UnsupportedPlan: a stage's operators are split over devices.
    """
    found = split_stages(job)
    if found and job.settings.compile is not None:
        rule = f"the schedule splits the backward of stage {found[0]}, and a compiled stage makes all of its gradients in one go"
        raise InvalidConfig("engine.compile", job.settings.compile, rule, f"set engine.compile=null, or {WHOLE}")
    for s in found:
        if (degree := job.plan.stages[s].tensor_parallel) > 1:
            raise UnsupportedPlan(
                f"the schedule splits the backward of stage {s}, whose operators are split over {degree} devices: they add up the "
                f"gradients of their inputs within it. Fix: plan with strategy.planner.tensor_parallel=false, or {WHOLE}"
            )
