"""Random markings of operators, and trainings with and without them: what a policy for memory must not change."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpp.cost.regime import Regime
from gpp.graph.captured import Captured
from gpp.models.base import AbstractModel
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.planners.chains.even import Even
from gpp.runtime.job import Job, assemble
from gpp.runtime.worker.stage import StageRunner
from gpp.schedules.gpipe import GPipe
from gpp.schedules.no_flush import NoFlush
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.weights.base import AbstractWeights
from gpp.weights.double_buffer import DoubleBuffer
from gpp.weights.flush import Flush
from gpp.weights.stash import Stash
from gpp.weights.vertical_sync import VerticalSync
from tests.support import inprocess
from tests.support.asynchronous import captured as small_captured
from tests.support.conf import network_named
from tests.support.problems import random_partition

MINIBATCH = 8
SMALL = (
    *("Chain4", "Dropping", "Fork", "Frozen", "FrozenSkip", "Halved4", "Integers", "Masking", "NormedBatch", "Skip"),
    *("ThreeOutputs", "Tied", "Turned", "TwoLosses", "TwoSinks", "TwoSources"),
)
NAMED: dict[str, dict[str, Any]] = {
    **{f"{name}_small": {} for name in ("candle_uno", "clip", "dlrm", "evoformer", "flava", "gnmt", "imagebind", "llava", "unet")},
    **{
        f"{name}_small": {"dropout": 0.1}
        for name in ("bridge_tower", "gpt", "inception", "mmt", "residual_lstm", "translator", "vgg")
    },
    "resnet_small": {"norm": "batch"},
    "digits": {},
    "digits_deep": {},
    "digits_tasks": {},
}
POLICIES: tuple[AbstractWeights, ...] = (Flush(), Stash(), VerticalSync(), DoubleBuffer())


def model_of(name: str) -> tuple[AbstractModel, Captured, dict[str, torch.Tensor]]:
    """A small network by its class, or a model by its option's name; captured in float64, with its weights."""
    if name in SMALL:
        return small_captured(name)
    model = network_named(name, **NAMED[name]) if NAMED[name] else inprocess.captured_named(name)[0]
    return model, *inprocess.capture(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All that a training leaves behind, and every gradient that an optimizer has seen, by device and stage."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    gradients: dict[tuple[int, int], list[torch.Tensor]]

    def differences(self, other: Training) -> list[str]:
        """What is not equal bit for bit."""
        found = ["losses"] if self.losses != other.losses else []
        found += [name for name in self.state if not torch.equal(self.state[name], other.state[name])]
        for key, mine in self.gradients.items():
            theirs = other.gradients[key]
            if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                found.append(f"gradients of device {key[0]}, stage {key[1]}")
        return found


def random_job(name: str, policy: AbstractWeights, rng: random.Random, *, steps: int) -> tuple[Job, dict[str, torch.Tensor]]:
    """A job of a random plan that keeps everything."""
    model, found, weights = model_of(name)
    data = inprocess.data_of(model)
    schedule = rng.choice([OneFOneB(), GPipe()]) if policy.flushes else NoFlush()
    problem = inprocess.problem_of(
        found, 8, MINIBATCH, max_ops=rng.choice([8, 16, 32]), regime=Regime(in_flight=schedule.in_flight)
    )
    strategy = Strategy(name="test", planner=Even(), schedule=schedule, weights=policy)
    count = problem.graph.num_ops
    parts = [
        (mask, rng.choice([1, 1, 2])) for mask in random_partition(problem.graph, rng.randint(min(2, count), min(4, count)), rng)
    ]
    # As strategies ask planners: one with a very large mini-batch is a pipeline that does not drain.
    asked = problem if policy.flushes else replace(problem, minibatch_size=64 * MINIBATCH)
    sizes: int | list[int] = [rng.choice([2, 4]) for _ in parts]
    if not policy.flushes:
        # Double buffering needs as many micro-batches as there are stages in flight.
        sizes = 2 if isinstance(policy, DoubleBuffer) else rng.choice([2, 4, 8])
    plan = replace(make_plan(asked, "test", parts, sizes, chain=rng.random() < 0.3), minibatch_size=MINIBATCH)
    strategy.check(plan, strategy.posed(problem))
    train_samples = len(data.load("train", model, seed=0, dtype="float64"))
    job = assemble(
        *(found, problem, plan, strategy),
        optimizer=SGD(lr=0.05, momentum=0.9),
        data=data,
        model=model,
        steps=steps,
        dtype="float64",
        seed=0,
        train_samples=train_samples,
    )
    return job, weights


def marked(job: Job, rng: random.Random, *, ways: str | None = None) -> Job:
    """The same job with operators discarded and moved at random."""
    shares = ways or rng.choice(["krm", "kr", "rrrm", "r", "m", "km"])
    return with_ways(job, lambda op: rng.choice(shares))


def with_ways(job: Job, way: Any) -> Job:
    """The same job with operators (k)ept, (r)ecomputed or (m)oved as `way` says."""
    stages = []
    for s, stage in enumerate(job.plan.stages):
        ways = {op: way(op) if job.plan.runs_backward(s, job.graph) else "k" for op in stage.ops}
        again, moved = ([op for op in stage.ops if ways[op] == kind] for kind in "rm")
        stages.append(replace(stage, recompute=tuple(again), offload=tuple(moved)))
    plan = replace(job.plan, stages=tuple(stages))
    return replace(job, plan=plan)


def train(job: Job, weights: dict[str, torch.Tensor], folder: Path) -> Training:
    """Train in threads."""
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen[id(optimizer)] += [p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    hook = register_optimizer_step_pre_hook(note)
    try:
        with moving():
            losses, state, workers = inprocess.run(job, folder, weights)
    finally:
        hook.remove()
    of = {(w.device_id, s): seen[id(optimizer)] for w in workers for s, optimizer in w.optimizers.items()}
    return Training(losses=losses, state={name: t.clone() for name, t in state.items()}, gradients=of)


@contextmanager
def moving() -> Iterator[None]:
    """Until programs say it: a copy begins right after its forward, and comes back right before the backward."""
    forward, backward = StageRunner.forward, StageRunner.backward

    def out(self: StageRunner, microbatch: int) -> Any:
        span = forward(self, microbatch)
        self.copy_out(microbatch)
        return span

    def back(self: StageRunner, microbatch: int) -> Any:
        self.fetch(microbatch)
        return backward(self, microbatch)

    StageRunner.forward, StageRunner.backward = out, back
    try:
        yield
    finally:
        StageRunner.forward, StageRunner.backward = forward, backward
