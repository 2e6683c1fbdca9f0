"""Random markings of operators, and trainings with and without them: what a policy for memory must not change."""

from __future__ import annotations

import random
import traceback
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpp import DoubleBuffer, Even, Flush, GPipe, NoFlush, OneFOneB, Plan, Stash, Strategy, VerticalSync
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.graph.captured import Captured
from gpp.mechanisms.marks.stage import marked
from gpp.models.base import AbstractModel
from gpp.optimizers import SGD, AbstractOptimizer
from gpp.plan.build import make_plan
from gpp.runtime.job import Job
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.conf import network_named
from tests.support.problems import random_partition
from tests.support.staged import captured
from tests.support.switches import bits

MINIBATCH = 8
MOMENTUM = SGD(lr=0.05, momentum=0.9)
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


def model_of(name: str, dtype: str = "float64") -> tuple[AbstractModel, Captured, dict[str, torch.Tensor]]:
    """A small network by its class, or a model by its option's name; captured, with its weights."""
    if name in SMALL:
        model = captured(name)[0]
    else:
        model = network_named(name, **NAMED[name]) if NAMED[name] else inprocess.captured_named(name)[0]
    return model, *inprocess.capture(model, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All that a training leaves behind, and every gradient that an optimizer has seen, by device and stage."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    gradients: dict[tuple[int, int], list[torch.Tensor]]

    def differences(self, other: Training) -> list[str]:
        """What is not equal bit for bit."""
        found = ["losses"] if self.losses != other.losses else []
        found += [name for name in self.state if bits(self.state[name]) != bits(other.state[name])]
        for key, mine in self.gradients.items():
            theirs = other.gradients[key]
            if list(map(bits, mine)) != list(map(bits, theirs)):
                found.append(f"gradients of device {key[0]}, stage {key[1]}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training of a plan, of which the marks are still open."""

    model: AbstractModel
    found: Captured
    weights: dict[str, torch.Tensor]
    problem: Problem
    strategy: Strategy
    plan: Plan

    def job(
        self,
        ways: Callable[[int], str],
        *,
        steps: int = 3,
        optimizer: AbstractOptimizer = MOMENTUM,
        **settings: Any,
    ) -> Job:
        """The job whose operators are (k)ept, (r)ecomputed, (b)oundaries of what is, or (m)oved; stages without a backward keep
        theirs."""
        stages = []
        for s, stage in enumerate(self.plan.stages):
            own = {op: ways(op) if self.plan.runs_backward(s, self.problem.graph) else "k" for op in stage.ops}
            again, moved, ends = (tuple(op for op in stage.ops if own[op] in ways) for ways in ("rb", "m", "b"))
            stages.append(marked(stage, recompute=again, offload=moved, boundaries=ends))
        plan = replace(self.plan, stages=tuple(stages))
        own = {"model": self.model, "optimizer": optimizer, "steps": steps}
        return inprocess.job_under(self.strategy, self.found, self.problem, plan, **own, **settings)


def with_host(problem: Problem) -> Problem:
    """The same with a link from every device to the host."""
    devices = tuple(replace(device, host_bandwidth_bytes_per_s=1e9) for device in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def random_case(
    name: str, policy: AbstractWeights, rng: random.Random, *, minibatch: int = MINIBATCH, dtype: str = "float64"
) -> Case:
    """A random plan of a model: stages, replicas, sizes of micro-batches, schedule."""
    model, found, weights = model_of(name, dtype)
    schedule = rng.choice([OneFOneB(), GPipe()]) if policy.flushes else NoFlush()
    regime = Regime(holds=schedule.holds)
    problem = with_host(inprocess.problem_of(found, 8, minibatch, max_ops=rng.choice([8, 16, 32]), regime=regime))
    strategy = Strategy(name="test", planner=Even(), schedule=schedule, weights=policy)
    count = problem.graph.num_ops
    masks = random_partition(problem.graph, rng.randint(min(2, count), min(4, count)), rng)
    # As strategies ask planners: one with a very large mini-batch is a pipeline that does not drain.
    asked = problem if policy.flushes else replace(problem, minibatch_size=64 * minibatch)
    sizes: int | list[int] = [rng.choice([2, 4]) for _ in masks]
    if not policy.flushes:
        # Double buffering needs as many micro-batches in a mini-batch as are in flight.
        sizes = 2 if isinstance(policy, DoubleBuffer) else rng.choice([2, 4, 8])
    parts = [(mask, rng.choice([1, 1, 2])) for mask in masks]
    plan = replace(make_plan(asked, "test", parts, sizes, chain=rng.random() < 0.3), minibatch_size=minibatch)
    strategy.check(plan, strategy.posed(problem))
    return Case(model=model, found=found, weights=weights, problem=problem, strategy=strategy, plan=plan)


def random_ways(rng: random.Random) -> Callable[[int], str]:
    """A way for each operator, at random."""
    ways = rng.choice(["krm", "kr", "rrrm", "r", "m", "km", "b", "rb", "krb", "krbm"])
    return lambda op: rng.choice(ways)


def keep(op: int) -> str:
    """The way of every operator without a policy."""
    return "k"


def train(job: Job, weights: dict[str, torch.Tensor], folder: Path) -> Training:
    """Train in threads."""
    seen: dict[int, list[torch.Tensor]] = defaultdict(list)

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen[id(optimizer)] += [p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    hook = register_optimizer_step_pre_hook(note)
    try:
        losses, state, workers = inprocess.run(job, folder, weights)
    finally:
        hook.remove()
    of = {(w.device_id, s): seen[id(optimizer)] for w in workers for s, optimizer in w.optimizers.items()}
    return Training(losses=losses, state={name: t.clone() for name, t in state.items()}, gradients=of)


def random_trainings(
    given: Namespace, differences: Callable[[int, str, random.Random, Counter[str]], tuple[list[str], str]]
) -> int:
    """Compare `given.count` trainings from the seed `given.first` on, of every model in turn; the exit code of a check."""
    names, bad, done = given.models or [*SMALL, *NAMED], 0, Counter[str]()
    for seed in range(given.first, given.first + given.count):
        name = names[seed % len(names)]
        try:
            wrong, words = differences(seed, name, random.Random(seed), done)
        except Exception:
            wrong, words = [traceback.format_exc()], ""
        if wrong:
            bad += 1
            print(f"seed {seed}: {name}, {words}: {', '.join(wrong)}", flush=True)
    print(f"{given.count} trainings, {bad} of them differ; {dict(sorted(done.items()))}")
    return int(bad > 0)
