"""Checkpoints without a training: those of two ranks that hold one tensor each."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpp import SGD, GPipe, OneFOneB
from gpp.cost.regime import Regime
from gpp.plan.build import make_plan
from gpp.runtime.checkpoint.checkpoint import Checkpointer
from gpp.runtime.job import Job
from tests.support import inprocess
from tests.support.problems import random_partition

STEPS, MINIBATCH = 6, 16


def random_job(
    name: str, optimizer: Any, rng: random.Random, *overrides: str, one: bool = False
) -> tuple[Job, dict[str, torch.Tensor]]:
    """Some plan for the model, with replicas and unequal micro-batches; or `one` stage on one device."""
    model, cap, weights = inprocess.captured_named(name, *overrides)
    schedule = rng.choice([OneFOneB(), GPipe()])
    problem = inprocess.problem_of(cap, 8, MINIBATCH, max_ops=rng.choice([16, 24]), regime=Regime(holds=schedule.holds))
    parts = random_partition(problem.graph, 1 if one else rng.randint(2, 4), rng)
    replicas = [1 if one else rng.choice([1, 1, 2]) for _ in parts]
    plan = make_plan(problem, "test", list(zip(parts, replicas, strict=True)), [rng.choice([4, 8]) for _ in parts])
    return inprocess.make_job(cap, problem, plan, schedule, model=model, optimizer=optimizer, steps=STEPS), weights


class Rank(Checkpointer):
    """One of two ranks of a tiny training that needs no network; `trained` if an optimizer updates its tensor."""

    def __init__(self, run_dir: Path, rank: int, keep: int = 3, trained: bool = False, **settings: Any) -> None:
        job, _ = random_job("digits", SGD(lr=0.1, momentum=0.9), random.Random(0))
        settings = {"checkpoint_every": 1, "checkpoint_keep": keep, "timeout_s": 30.0, **settings}
        job = replace(job, settings=replace(job.settings, **settings))
        self.value = torch.zeros(3, requires_grad=trained)
        name = f"tensor_{rank}"
        super().__init__(
            job,
            run_dir,
            rank=rank,
            world=2,
            weights={name: self.value},
            optimizers=[torch.optim.SGD([self.value])] if trained else [],
            owned=frozenset([name]),
        )


def made(run_dir: Path, done: int) -> Path:
    """A checkpoint of two ranks."""
    ranks = [Rank(run_dir, 0), Rank(run_dir, 1)]
    for rank in ranks:
        rank.save(done)
    for rank in ranks:
        rank.wait()
    return run_dir / "checkpoints" / f"step_{done}"
