"""Which policies for the memory of stages can be carried out: what of them nobody could, or not together with other settings."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.runtime.job import Job, restore

KEEP = "set strategy/memory=keep"


def refuse_split_recomputation(plan: Plan) -> None:
    """Refuse to compute split operators again, whose sums the other devices would have to repeat at the same moment.

    Raises:
        UnsupportedPlan: names the stage.
    """
    for s, stage in enumerate(plan.stages):
        if stage.recompute and stage.tensor_parallel > 1:
            raise UnsupportedPlan(
                f"stage {s} computes operators {list(stage.recompute[:8])} again and splits its operators over "
                f"{stage.tensor_parallel} devices, whose sums cannot be repeated. Fix: plan without one of the two "
                f"({KEEP}, or strategy.planner.tensor_parallel=false)"
            )


def check_policies(job: Job) -> None:
    """Refuse policies that the job's workers cannot carry out.

    Raises:
        InvalidConfig: the job's compiler or its weight policy do not go with them; names the setting.
        UnsupportedPlan: names the stage and the operator.
    """
    plan, settings = job.plan, job.settings
    refuse_split_recomputation(plan)
    marked = [s for s, stage in enumerate(plan.stages) if stage.recompute or stage.offload]
    if marked and settings.compile is not None:
        rule = f"stage {marked[0]} recomputes operators or has some on the host, which a compiled stage cannot tell apart"
        raise InvalidConfig("engine.compile", settings.compile, rule, f"set engine.compile=null, or {KEEP}")
    _check_blocks(plan, job.graph, job.captured)
    if job.streams:
        _check_weights(job)


def _check_blocks(plan: Plan, graph: OpGraph, captured: Captured) -> None:
    """Refuse to call a hand-written block again: its buffers and the weights that it finds are its own business.

    Raises:
        UnsupportedPlan: names the block.
    """
    for s, stage in enumerate(plan.stages):
        for op in stage.recompute:
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
        for op in stage.recompute if policy.changes(plan.position(s)) else ():
            if names := graph.trained_by[op]:
                rule = (
                    f"its backwards find other weights than the forwards did, and stage {s} computes operator "
                    f"{graph.ops[op].name}, which reads {names[0]}, again in the backward"
                )
                raise InvalidConfig("strategy.weights", policy.name, rule, f"set strategy/weights=stash, or {KEEP}")
