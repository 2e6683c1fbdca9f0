"""What the cost model gives each stage of a plan, as plain numbers: all that an emulated device has to know of a model.

The simulator asks the same methods of `Problem`, so emulated and simulated times cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.simulate.simulator import pass_times
from gpp.weights.flush import Flush


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage's times and bytes on each of its devices.

    Args:
        forward_s, backward_s: of one micro-batch; the slowest of the stage's devices decides.
        last_forward_s, last_backward_s: of the last one, perhaps a smaller one.
        update_s: the optimizer's step.
        resident_bytes: memory without any micro-batch in flight.
        microbatch_bytes: memory of each micro-batch between its forward and its backward.
    """

    forward_s: float
    backward_s: float
    last_forward_s: float
    last_backward_s: float
    update_s: float
    resident_bytes: float
    microbatch_bytes: float


def stage_costs(problem: Problem, plan: Plan) -> tuple[StageCost, ...]:
    """The costs of every stage of `plan`, in order."""
    out, one_version = [], replace(problem, weights=Flush(), assumed_copies=1)
    for s, stage in enumerate(plan.stages):
        b, t = stage.microbatch_size, stage.tensor_parallel
        rest = plan.minibatch_size % b or b
        whole, last = (pass_times(problem, plan, s, n) for n in (b, rest))
        # Memory grows by the same amount with every micro-batch, so two points give the line.
        count = len(stage.devices) // stage.turns
        one, two = (one_version.stage_memory(stage.ops, b, count, n * b, stage.recompute, t) for n in (1, 2))
        trainable = problem.trainable_bytes(stage.ops, t)
        out.append(
            StageCost(
                forward_s=whole[0],
                backward_s=whole[1],
                last_forward_s=last[0],
                last_backward_s=last[1],
                update_s=problem.cost.update_s(trainable, problem.cluster.devices[stage.devices[0]])
                + problem.weight_times(stage.ops, stage.devices[0], plan.position(s), t)[2],
                resident_bytes=2 * one - two + trainable * (problem.weights.copies(plan.position(s)) - 1),
                microbatch_bytes=two - one,
            )
        )
    return tuple(out)
