"""What schedules that split backwards cannot give."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.memory.policy import AbstractMemory
from gpp.planners.base import AbstractPlanner
from gpp.schedules.base import AbstractSchedule


def check_schedule(schedule: AbstractSchedule, problem: Problem, planner: AbstractPlanner, memory: AbstractMemory) -> None:
    """Refuse a problem, and a planner, that a schedule is not for, and a memory policy beside a planner that marks stages itself.

    Raises:
        InvalidConfig: a loss on whole mini-batches, a norm over all stages, a k above 1, or a proof for other schedules.
    """
    alternates = schedule.holds.splits or schedule.per_device > 1
    name = f"strategy.schedule={type(schedule).__name__}"
    if alternates and problem.minibatch_ops:
        rule = f"a loss on whole mini-batches has all backwards behind all forwards, and {name} alternates them"
        raise InvalidConfig("loss.scope", "minibatch", rule, "set loss.scope=microbatch, or strategy/schedule=1f1b")
    if schedule.overlaps_steps and problem.global_norm:
        rule = f"for the norm over all stages all devices meet between two steps, and {name} begins the next one meanwhile"
        fix = (
            "set optimizer.clip_scope=stage to clip each stage by its own norm (and optimizer.log_gradient_norm=false), or "
            "strategy/schedule=zero_bubble_h1"
        )
        raise InvalidConfig("optimizer.clip_scope", "model", rule, fix)
    if alternates and planner.proves:
        rule = f"what it proves is about whole backwards of one stage a device, and {name} has others"
        raise InvalidConfig(
            "strategy.planner", type(planner).__name__, rule, "set strategy/planner=graphpipe, or strategy/schedule=1f1b"
        )
    if planner.marks and alternates:
        rule = f"it counts on whole backwards and one stage a device to say what fits, and {name} has others"
        raise InvalidConfig(
            "strategy.planner", type(planner).__name__, rule, "set strategy/planner=graphpipe, or strategy/schedule=1f1b"
        )
    if planner.marks and memory.ways:
        rule = f"strategy.planner={type(planner).__name__} decides itself which operators are kept"
        raise InvalidConfig("strategy.memory", memory.name, rule, "set strategy/memory=keep, and the planner's own settings")
    if alternates and planner.varies_k:
        rule = f"stages may get a k above 1, and under {name} each runs one forward and one backward in turn"
        raise InvalidConfig("strategy.planner.per_stage", True, rule, "set it to false, or strategy/schedule=1f1b")
