"""Plans with helpers (`gpp.plan.helpers`) are predicted only: what would run them is refused before anything is captured."""

from __future__ import annotations

from gpp.errors import InvalidConfig
from gpp.plan.helpers import refuse_helpers
from gpp.plan.plan import Plan
from gpp.runtime.engine import AbstractEngine
from gpp.strategy import Strategy


def check_helped(engine: AbstractEngine, strategy: Strategy, given: Plan | None) -> None:
    """Refuse to run plans with helpers.

    Args:
        given: the plan in the user's own file; None where the strategy is to plan.

    Raises:
        InvalidConfig: the planner's plans have helpers.
        UnsupportedPlan: the given one has.
    """
    if given is not None:
        refuse_helpers(given.stages)
    elif strategy.planner.helps:
        rule = f"strategy={strategy.name} has other devices make parts of a stage's backward, which no engine does yet"
        raise InvalidConfig("engine", engine.name, rule, "set mode=plan or mode=compare, which predict it, or strategy=pipedream")
