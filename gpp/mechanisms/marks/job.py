"""Which marks can be carried out: what of them nobody could, or not together with other settings."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marks_of
from gpp.plan.plan import Plan
from gpp.runtime.engine import task_of
from gpp.runtime.job import AbstractJobPart, Job, restore
from gpp.runtime.task import EngineTask

KEEP = "set strategy/memory=keep"


class MarksJobPart(AbstractJobPart):
    """Split operators, compiled stages, hand-written blocks, and weights that are others in the backward."""

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        """Refuse to compute split operators again, whose sums the other devices would have to repeat at the same moment."""
        for s, stage in enumerate(plan.stages):
            recompute = marks_of(stage).recompute
            if recompute and (t := stage.devices_per_replica) > 1:
                raise UnsupportedPlan(
                    f"stage {s} computes operators {list(recompute[:8])} again and splits its operators over {t} devices, whose "
                    f"sums cannot be repeated. Fix: plan without one of the two ({KEEP}, or {stage.unshared})"
                )

    def refuse(self, job: Job) -> None:
        plan, settings = job.plan, job.settings
        self.refuse_plan(plan, task_of(job))
        marked = next(s for s, stage in enumerate(plan.stages) if stage.spares)
        if settings.compile is not None:
            rule = f"stage {marked} recomputes operators or has some on the host, which a compiled stage cannot tell apart"
            raise InvalidConfig("engine.compile", settings.compile, rule, f"set engine.compile=null, or {KEEP}")
        moved = [s for s, stage in enumerate(plan.stages) if marks_of(stage).offload]
        if moved and settings.enforce_memory:
            rule = f"stage {moved[0]} has operators on the host, whose memory is that of its devices here"
            raise InvalidConfig("engine.enforce_memory", True, rule, "leave it out, or set strategy/memory=recompute")
        _check_blocks(plan, job.graph, job.captured)
        if job.streams:
            _check_weights(job)


JOB = MarksJobPart()


def _check_blocks(plan: Plan, graph: OpGraph, captured: Captured) -> None:
    """Refuse to call a hand-written block again: its buffers and the weights that it finds are its own business.

    Raises:
        UnsupportedPlan: names the block.
    """
    for s, stage in enumerate(plan.stages):
        for op in marks_of(stage).recompute:
            if block := next((node for node in graph.ops[op].nodes if captured.node_of[node].kind == "block"), None):
                raise UnsupportedPlan(
                    f"stage {s} computes operator {graph.ops[op].name} again, and its block {block} is hand-written: only captured "
                    f"nodes can be. Fix: take operator {op} out of recompute (strategy/memory=offload moves it), or {KEEP}"
                )


def _check_weights(job: Job) -> None:
    """Refuse to compute with other weights again than the first time.

    Raises:
        InvalidConfig: names the policy, the operator and the parameter.
    """
    plan, graph, policy = job.plan, job.graph, restore(job.settings.weights)
    for s, stage in enumerate(plan.stages):
        for op in marks_of(stage).recompute if policy.changes(plan.position(s)) else ():
            if names := graph.trained_by[op]:
                rule = (
                    f"its backwards find other weights than the forwards did, and stage {s} computes operator "
                    f"{graph.ops[op].name}, which reads {names[0]}, again in the backward"
                )
                raise InvalidConfig("strategy.weights", policy.name, rule, f"set strategy/weights=stash, or {KEEP}")
