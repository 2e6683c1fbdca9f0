"""What plans with helpers (`gpp.plan.helpers`) cannot be combined with is refused before anything is captured."""

from __future__ import annotations

from gpp.errors import InvalidConfig
from gpp.plan.helpers import check_runnable
from gpp.plan.plan import Plan
from gpp.runtime.engine import AbstractEngine
from gpp.strategy import Strategy


def check_helped(engine: AbstractEngine, strategy: Strategy, given: Plan | None) -> None:
    """Refuse to run plans with helpers of a form that nobody runs, or on an engine without helpers.

    Args:
        given: the plan in the user's own file; None where the strategy is to plan.

    Raises:
        InvalidConfig: the planner's plans are such, or the engine is.
        UnsupportedPlan: the given plan is.
    """
    if given is not None:
        check_runnable(given.stages)
    if (given.helped if given is not None else strategy.planner.helps) and not engine.helps:
        rule = "does not have devices make parts of other devices' backwards"
        fix = "use engine=distributed or engine=reference, or mode=plan, which predicts it"
        raise InvalidConfig("engine", engine.name, rule, fix)
