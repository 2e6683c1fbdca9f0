"""What the engines that leave the model whole ask of a plan."""

from __future__ import annotations

from gpp.errors import UnsupportedPlan
from gpp.plan.plan import Plan
from gpp.runtime.engine import refuse_what_does_not_run


def refuse_several_stages(plan: Plan, engine: str) -> None:
    """A plan that cuts the model is not for an engine that runs it whole.

    Raises:
        UnsupportedPlan: it has several stages, recomputes or splits operators.
    """
    refuse_what_does_not_run(plan)
    if len(plan.stages) > 1:
        raise UnsupportedPlan(
            f"the plan has {len(plan.stages)} stages, but engine={engine} runs the model whole. Fix: leave plan out, "
            "or engine=distributed"
        )
