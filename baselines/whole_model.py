"""The plans that engines with a whole model can run."""

from __future__ import annotations

from gpp.errors import UnsupportedPlan
from gpp.plan.plan import Plan
from gpp.runtime.engine import refuse_policies, refuse_split_operators


def refuse_several_stages(plan: Plan, engine: str) -> None:
    """Refuse a plan that cuts the model, for an engine that runs it whole.

    Raises:
        UnsupportedPlan: the plan has several stages, recomputes, moves or splits operators.
    """
    refuse_policies(plan)
    refuse_split_operators(plan, "this engine")
    if len(plan.stages) > 1:
        raise UnsupportedPlan(
            f"the plan has {len(plan.stages)} stages, but engine={engine} runs the model whole. Fix: leave plan out, "
            "or engine=distributed"
        )
