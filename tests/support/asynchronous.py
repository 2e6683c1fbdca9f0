"""Jobs whose pipelines do not drain, on the small networks: what the tests of asynchronous training share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from gpp import DoubleBuffer, Even, Naive, NoFlush, OneFOneB, PipeMare, PipeOptim, SpecTrain, Stash, Strategy, VerticalSync
from gpp.data.base import AbstractData
from gpp.data.synthetic import Synthetic
from gpp.mechanisms.helpers.stage import Helpers, delays
from gpp.optimizers import AbstractOptimizer
from gpp.plan.build import make_plan
from gpp.runtime.job import Job
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.staged import captured, parts_of

MINIBATCH, HELD_OUT, STEPS = 8, 12, 24
DATA = Synthetic(num_samples=48, num_test_samples=HELD_OUT)

POLICIES: dict[str, AbstractWeights] = {
    "naive": Naive(),
    "stash": Stash(),
    "vertical sync": VerticalSync(),
    "double buffer": DoubleBuffer(),
    "spectrain 1": SpecTrain(form=1),
    "spectrain 2": SpecTrain(form=2),
    "pipemare": PipeMare(),
    "pipeoptim": PipeOptim(),
    "pipeoptim offset": PipeOptim(offset=1),
    "pipeoptim zero": PipeOptim(future="zero"),
    "pipeoptim decay": PipeOptim(decay=True),
    "pipeoptim constant": PipeOptim(horizon_from="constant"),
}


def make_job(
    network: str,
    policy: AbstractWeights,
    optimizer: AbstractOptimizer,
    *,
    sizes: int | tuple[int, ...] = MINIBATCH,
    replicas: tuple[int, ...] | None = None,
    steps: int = STEPS,
    minibatch_size: int = MINIBATCH,
    data: AbstractData = DATA,
    whole: bool = False,
    ahead: tuple[int, ...] = (),
    devices: tuple[int, ...] = (),
    helpers: tuple[int | None, ...] = (),
    shares: Mapping[int, tuple[tuple[int, float], ...]] | None = None,
    **settings: Any,
) -> tuple[Job, dict[str, Tensor]]:
    """The job of a network, a stage for each of its submodules s0, s1, ...; and its initial weights.

    Args:
        sizes: micro-batch of each stage, or of all.
        replicas: devices of each stage; one each by default.
        whole: all of it is one stage.
        ahead: micro-batches in flight at each stage, where it is not 1F1B's number.
        devices: of the stages, one each, where helpers make parts of their backwards; as many are in flight as these ask for.
        helpers: who makes the gradients of each stage's weights.
        shares: stage -> who makes parts of the gradients of its inputs.
    """
    model, found, weights = captured(network)
    masks = [found.graph.all_mask] if whole else parts_of(found.graph)
    counts = replicas or (1,) * len(masks)
    world = 1 + max(*devices, *(h or 0 for h in helpers)) if devices else sum(counts)
    problem = replace(inprocess.problem_of(found, world, minibatch_size), graph=found.graph)
    schedule = OneFOneB() if policy.flushes else NoFlush()
    strategy = Strategy(name="test", planner=Even(), schedule=schedule, weights=policy)
    # As strategies ask planners: one with a very large mini-batch is a pipeline that does not drain.
    asked = problem if policy.flushes else replace(problem, minibatch_size=64 * minibatch_size)
    parts = list(zip(masks, counts, strict=True))
    placement = [(device,) for device in devices] or None
    plan = make_plan(asked, "test", parts, sizes if isinstance(sizes, int) else list(sizes), ordered=True, placement=placement)
    held = [count * stage.microbatch_size for count, stage in zip(ahead, plan.stages, strict=True)] if ahead else []
    stages = tuple(replace(stage, in_flight=held[s]) if held else stage for s, stage in enumerate(plan.stages))
    if devices:
        values = [Helpers(weight_device=helper, input_share=(shares or {}).get(s, ())) for s, helper in enumerate(helpers)]
        stages = tuple(stage.having(value) if value.beside else stage for stage, value in zip(stages, values, strict=True))
        late = delays(stages, plan.edges)
        stages = tuple(replace(s, in_flight=(d + 1) * s.microbatch_size) for s, d in zip(stages, late, strict=True))
    plan = replace(plan, minibatch_size=minibatch_size, stages=stages)
    strategy.check(plan, strategy.posed(problem))
    own = {"model": model, "data": data, "optimizer": optimizer, "steps": steps}
    return inprocess.job_under(strategy, found, problem, plan, **own, **settings), weights
