"""The limits of schedules that have backwards in parts, put several stages on a device, or do not drain."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, counted
from gpp.memory import AbstractMemory
from gpp.planners.base import AbstractPlanner
from gpp.schedules.base import AbstractSchedule
from gpp.weights.base import AbstractWeights

WHOLE = "set strategy/planner=graphpipe, or strategy/schedule=1f1b"
"""What helps a planner that knows whole backwards only."""
DRAINING, HALF_AS_FAR = "strategy/schedule=1f1b strategy/weights=flush", "strategy/schedule=zero_bubble_h1"
"""What helps where the pipeline must be empty between two steps, and where devices must meet there."""


def check_schedule(
    schedule: AbstractSchedule, problem: Problem, planner: AbstractPlanner, weights: AbstractWeights, memory: AbstractMemory
) -> None:
    """Refuse a problem or planner that a schedule does not fit, and a memory policy beside a planner that marks stages itself.

    Raises:
        InvalidConfig: a loss on whole mini-batches, a norm over all stages, a k above 1, or a proof for other schedules.
    """
    _check_losses(schedule, problem, weights)
    _check_norm(schedule, problem, weights)
    whole_devices, name = schedule.holds.parts or schedule.per_device > 1, f"strategy.schedule={schedule.name}"
    if whole_devices and planner.proves:
        rule = f"what it proves is about whole backwards of one stage a device, and {name} has others"
        raise InvalidConfig("strategy.planner", planner.name, rule, WHOLE)
    if whole_devices and planner.marks:
        rule = f"it counts on whole backwards and one stage a device to say what fits, and {name} has others"
        raise InvalidConfig("strategy.planner", planner.name, rule, WHOLE)
    if planner.marks and memory.ways:
        rule = f"strategy.planner={planner.name} decides itself which operators are kept"
        raise InvalidConfig("strategy.memory", memory.name, rule, "set strategy/memory=keep, and the planner's own settings")
    if planner.varies_k and (whole_devices or not schedule.drains):
        rule = f"stages may get a k above 1, and under {name} each runs one forward and one backward in turn"
        raise InvalidConfig("strategy.planner.per_stage", True, rule, f"set it to false, or {DRAINING}")


def _check_losses(schedule: AbstractSchedule, problem: Problem, weights: AbstractWeights) -> None:
    """Refuse a loss on whole mini-batches where backwards begin before all forwards have run."""
    if not problem.minibatch_ops:
        return
    if not schedule.drains:
        rule = f"strategy.weights={weights.name} keeps the pipeline full, and a loss on whole mini-batches empties it"
        raise InvalidConfig("loss.scope", "minibatch", rule, f"set loss.scope=microbatch, or {DRAINING}")
    if schedule.holds.parts or schedule.per_device > 1:
        rule = (
            f"a loss on whole mini-batches has all backwards behind all forwards, and strategy.schedule={schedule.name} "
            "alternates them"
        )
        raise InvalidConfig("loss.scope", "minibatch", rule, "set loss.scope=microbatch, or strategy/schedule=1f1b")


def _check_norm(schedule: AbstractSchedule, problem: Problem, weights: AbstractWeights) -> None:
    """Refuse a norm over all stages where devices do not meet between two steps; names the setting that asks for it."""
    if not problem.global_norm or (schedule.drains and not schedule.overlaps_steps):
        return
    why, other = f"strategy.schedule={schedule.name} begins the next one before all devices are there", HALF_AS_FAR
    if not schedule.drains:
        why, other = f"strategy.weights={weights.name} never drains", DRAINING
    field, value, fix = problem.norm_for or ("optimizer.clip_scope", "model", "set optimizer.clip_scope=stage")
    rule = f"the norm over all stages needs every gradient of a mini-batch, and {why}"
    raise InvalidConfig(field, value, rule, f"{fix}, or {other}")


def check_count(schedule: AbstractSchedule, problem: Problem, planner: AbstractPlanner) -> None:
    """Refuse more stages than operators: those of one device, or of all devices if the planner uses all.

    Raises:
        InvalidConfig: names the schedule, or the number of devices.
    """
    each, ops, devices = schedule.per_device, problem.graph.num_ops, problem.cluster.num_devices
    if each > ops:
        rule = f"a device would run {each} stages, and there {'is' if ops == 1 else 'are'} {counted(ops, 'operator')}"
        fix = "set fewer (strategy.schedule.k of interleaved_1f1b), or strategy/schedule=1f1b"
        raise InvalidConfig("strategy.schedule", schedule.name, rule, fix)
    if planner.fills and each * devices > ops:
        stages = f"{each} stages" if each > 1 else "a stage"
        have = f"{counted(ops, 'operator')} {'is' if ops == 1 else 'are'} enough for {ops // each}"
        rule = f"strategy.planner={planner.name} makes {stages} for each device, and {have}"
        fix = f"set cluster.num_devices={ops // each}, or strategy/planner=graphpipe, or raise graph.max_ops"
        raise InvalidConfig("cluster.num_devices", devices, rule, fix)
