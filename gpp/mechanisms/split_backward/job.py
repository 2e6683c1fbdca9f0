"""Which stages of a job have split backwards, and what these cannot be combined with."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.mechanisms.split_backward.kinds import HALVES
from gpp.runtime.job import AbstractJobPart, Job

WHOLE = "use strategy/schedule=1f1b"


def split_stages(job: Job) -> tuple[int, ...]:
    """The stages whose backwards the job's program has in two halves, ascending."""
    return tuple(sorted({action.stage for own in job.program.actions.values() for action in own if action.kind in HALVES}))


class SplitJobPart(AbstractJobPart):
    """Compiled stages, and operators that are split over devices."""

    def refuse(self, job: Job) -> None:
        found = split_stages(job)
        if found and job.settings.compile is not None:
            rule = (
                f"the schedule splits the backward of stage {found[0]}, and a compiled stage makes all of its gradients in one go"
            )
            raise InvalidConfig("engine.compile", job.settings.compile, rule, f"set engine.compile=null, or {WHOLE}")
        for s in found:
            if (stage := job.plan.stages[s]).devices_per_replica > 1:
                raise UnsupportedPlan(
                    f"the schedule splits the backward of stage {s}, whose operators are split over {stage.devices_per_replica} "
                    f"devices: they add up the gradients of their inputs within it. Fix: plan with {stage.unshared}, or {WHOLE}"
                )


JOB = SplitJobPart()
