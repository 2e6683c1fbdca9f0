"""The plans that engines with a whole model can run."""

from __future__ import annotations

from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.plan.plan import Plan
from gpp.runtime.engine import refuse_policies, refuse_split_operators
from gpp.runtime.job import Job, restore


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


def refuse_trained_loss(job: Job, engine: str) -> None:
    """Refuse a loss that is trained, for an engine that trains the network alone.

    Raises:
        InvalidConfig: names the parameter.
    """
    from gpp.models.losses import loss, module_of

    name = restore(job.settings.model).loss
    criterion = module_of(loss(name))
    trained = [own for own, param in criterion.named_parameters() if param.requires_grad] if criterion is not None else []
    if trained:
        rule = f"has parameters of its own, as {trained[0]}, and engine={engine} trains the network alone"
        raise InvalidConfig("model.loss", name, rule, "use engine=distributed")
