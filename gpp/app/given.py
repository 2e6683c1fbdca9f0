"""A plan from the user's own file."""

from __future__ import annotations

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidFile, InvalidPlan, MalformedProgram
from gpp.export.layout import GivenLayout
from gpp.graph.op_graph import mask_of
from gpp.plan.plan import Plan
from gpp.runtime.engine import AbstractEngine
from gpp.runtime.job import job_parts
from gpp.strategy import Strategy


def check_engine(engine: AbstractEngine, strategy: Strategy, given: Plan | None) -> None:
    """Refuse to run plans with mechanisms that the engine does not run.

    Args:
        given: the plan in the user's own file; None where the strategy is to plan.

    Raises:
        InvalidConfig: the engine.
    """
    for part in job_parts(given.mechanisms if given is not None else strategy.planner.mechanisms):
        part.check_engine(engine.name)


def check_given(strategy: Strategy, path: object, plan: Plan, problem: Problem, layout: GivenLayout | None = None) -> None:
    """Prove that a plan from a file can run under a strategy, to the end of its program.

    Args:
        layout: in the form of another engine, where the plan was made of one.

    Raises:
        InvalidConfig: its micro-batches have another size than the one that was asked for; or it has another order of passes.
        InvalidPlan, InvalidFile, Infeasible: as `Strategy.check`; names the file, and a fix.
    """
    if (b := problem.microbatch_size) is not None:
        for s, stage in enumerate(plan.stages):
            # A loss on the whole mini-batch stands in a stage of its own, and copies of a pipeline have a micro-batch each.
            size = stage.microbatch_size // (len(stage.replicas) if problem.copies else 1)
            if size != b and not mask_of(stage.ops) & problem.minibatch_ops:
                rule = f"stage {s} of plan={path} has micro-batches of {stage.microbatch_size} samples"
                fix = f"set microbatch_size={stage.microbatch_size}, or leave microbatch_size or plan out"
                raise InvalidConfig("microbatch_size", b, rule, fix)
    try:
        strategy.check(plan, problem)
        program = strategy.lower(plan, problem)
    except Infeasible as error:
        raise Infeasible(f"plan={path}: {error.constraint}", error.remedy) from None
    except InvalidConfig as error:
        raise InvalidFile(path, error.field, error.rule, error.fix, [error.value], "plan") from None
    except (InvalidPlan, MalformedProgram) as error:
        fix = "" if "Fix: " in str(error) else ". Fix: correct the file, or leave plan out"
        raise InvalidPlan(f"plan={path}: {error}{fix}") from None
    if layout is not None:
        layout.check_order(plan, problem.graph, program, strategy.schedule.name)


def check_only_size(batch: int, minibatch_size: int, model: str) -> None:
    """Refuse a mini-batch that is no multiple of a model's only micro-batch size.

    Raises:
        InvalidConfig: names the nearest multiple.
    """
    if minibatch_size % batch:
        rule = f"must be a multiple of {batch}, the only micro-batch size of model={model}"
        raise InvalidConfig(
            "minibatch_size", minibatch_size, rule, f"set minibatch_size={max(1, round(minibatch_size / batch)) * batch}"
        )
