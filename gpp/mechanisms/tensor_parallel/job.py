"""What stages whose operators are split over the devices of a replica cannot be combined with."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.program.kinds import COMPUTE
from gpp.program.program import teams
from gpp.runtime.job import AbstractJobPart, Job, restore


class TensorParallelJobPart(AbstractJobPart):
    """Weights that do not drain, compiled stages, norms of stages, optimizers of whole weights, devices that wait for others."""

    def refuse(self, job: Job) -> None:
        """As of the base class.

        Raises:
            UnsupportedPlan: names the devices.
        """
        plan, settings = job.plan, job.settings
        split = [s for s, stage in enumerate(plan.stages) if stage.devices_per_replica > 1]
        if not split:
            return
        s, stage = split[0], plan.stages[split[0]]
        who, without = f"stage {s} splits its operators over {stage.devices_per_replica} devices", stage.unshared
        if job.streams:
            policy = settings.weights["_target_"].rpartition(".")[2].lower()
            rule = f"{who}, which runs with weights that drain before every update"
            raise InvalidConfig("strategy.weights", policy, rule, f"set strategy/weights=flush, or {without}")
        if settings.compile is not None:
            rule = f"{who}, whose sums in the midst of a pass cannot be compiled"
            raise InvalidConfig("engine.compile", settings.compile, rule, f"set engine.compile=null, or {without}")
        if settings.optimizer.get("clip_norm") is not None and settings.optimizer.get("clip_scope") == "stage":
            rule = f"{who}, none of which has the norm of the stage"
            raise InvalidConfig("optimizer.clip_scope", "stage", rule, f"set optimizer.clip_scope=model, or {without}")
        optimizer = restore(settings.optimizer)
        if not optimizer.elementwise:
            rule = f"looks at a whole weight to update any of its numbers, and {who}, which have parts of it"
            raise InvalidConfig("optimizer", optimizer.name, rule, f"use one like gpp.Adam, or {without}")
        for team in teams(plan):
            orders = {tuple(a[:3] for a in job.program.actions[device] if a.kind in COMPUTE) for device in team}
            if len(orders) > 1:
                raise UnsupportedPlan(
                    f"devices {list(team)} split operators between them and meet in every pass, but run their passes in different "
                    f"orders, so that each would wait for the others. Fix: give the stage devices of its own, or {without}"
                )


JOB = TensorParallelJobPart()
