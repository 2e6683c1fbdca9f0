"""What plans with helpers cannot be combined with."""

from __future__ import annotations

from typing import Final

from gpp.errors import InvalidConfig
from gpp.mechanisms.helpers.stage import helpers_of
from gpp.plan.plan import Plan
from gpp.runtime.engine import task_of
from gpp.runtime.job import AbstractJobPart, Job
from gpp.runtime.task import EngineTask

RUN_BY: Final = ("distributed", "reference")
"""Engines that run plans with helpers."""


class JobPart(AbstractJobPart):
    """Engines without helpers, inputs whose gradients are no product of one layer, and settings of workers."""

    def check_engine(self, name: str) -> None:
        if name not in RUN_BY:
            rule = "does not have devices make parts of other devices' backwards"
            fix = "use engine=distributed or engine=reference, or mode=plan, which predicts it"
            raise InvalidConfig("engine", name, rule, fix)

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        """Refuse to divide what is no product; plans for cards, and for models without nodes, are predicted alone."""
        if task.kind == "cpu" and task.captured:
            self._check(plan, task)

    def check(self, job: Job, *, overwrites: bool) -> None:
        self._check(job.plan, task_of(job))

    def _check(self, plan: Plan, task: EngineTask) -> None:
        if any(helpers_of(stage).input_share for stage in plan.stages):
            # Needs torch, which nobody else has loaded yet.
            from gpp.mechanisms.helpers.operands import check_divided

            check_divided(plan, task)

    def refuse(self, job: Job) -> None:
        found = next(s for s, stage in enumerate(job.plan.stages) if stage.beside)
        settings, helpers = job.settings, list(helpers_of(job.plan.stages[found]).beside)
        rule = f"devices {helpers} help stage {found}: "
        if settings.device_kind != "cpu":
            raise InvalidConfig(
                "cluster", job.cluster.name, f"{rule}no proof covers their messages on cards yet", "use cluster=local"
            )
        if settings.autocast:
            why = f"{rule}casts are differentiated with their operators, on the stage's own device"
            raise InvalidConfig("engine.autocast", settings.autocast, why, "set engine.autocast=null")
        if settings.enforce_memory:
            why = f"{rule}what a helper holds is no stage's of its own, by which the limit is set"
            raise InvalidConfig("engine.enforce_memory", True, why, "set engine.enforce_memory=false")
        if settings.checkpoint_every and not settings.checkpoint_drain:
            why = f"{rule}stages of one device have made different numbers of updates while micro-batches are in flight"
            raise InvalidConfig("checkpoint.drain", False, why, "set checkpoint.drain=true")


JOB = JobPart()
