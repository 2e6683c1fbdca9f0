"""Jobs for the engines of chains: three workers, float64, a model whose stages are no chain unless it is one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.harness import Harness
from baselines.whole_model_worker import WholeModel
from gpp import SGD, DataParallel, OneFOneB, Plan
from gpp.data.synthetic import Synthetic
from gpp.plan.build import make_plan
from gpp.runtime.checkpoint.final import finish_final, load_final
from gpp.runtime.job import Job
from tests.support import inprocess
from tests.support.problems import random_partition

WORLD, STEPS, MINIBATCH, MICROBATCH = 3, 3, 12, 2
HELD_OUT = 7


@dataclass(frozen=True)
class Case:
    """One job.

    Args:
        stages: 3, or 6 for two on each device.
        down_and_up: devices 0 1 2 2 1 0 instead of 0 1 2 0 1 2.
    """

    name: str
    engine: str
    schedule: str = "1F1B"
    overrides: tuple[str, ...] = ()
    stages: int = WORLD
    down_and_up: bool = False
    clip_norm: float | None = None
    lr: float = 0.05
    seed: int = 0

    @property
    def id(self) -> str:
        words = [self.engine, self.name, *(word.partition(".")[2] for word in self.overrides)]
        words += [self.schedule] if self.engine == "torch_pipelining" else []
        return "-".join([*words, "clipped"] if self.clip_norm else words)


def optimizer_of(case: Case) -> SGD:
    return SGD(lr=case.lr, momentum=0.9, clip_norm=case.clip_norm)


def make(case: Case, run_dir: Path, *, single: bool = False) -> Job:
    """The case's job, saved below `run_dir`; `single`: the same on one device, micro-batch by micro-batch."""
    model, captured, weights = inprocess.captured_named(case.name, *case.overrides)
    data = Synthetic(num_samples=36, num_test_samples=HELD_OUT)
    problem = inprocess.problem_of(captured, 1 if single else WORLD, MINIBATCH, max_ops=24)
    plan = _plan(case, problem, single)
    own = {"model": model, "data": data, "optimizer": optimizer_of(case), "steps": STEPS, "held_out": HELD_OUT}
    job = inprocess.make_job(captured, problem, plan, OneFOneB(), **own)
    job = replace(job, settings=replace(job.settings, engine={"schedule": case.schedule}, timeout_s=60.0))
    run_dir.mkdir(parents=True, exist_ok=True)
    job.save(run_dir, weights)
    return job


def _plan(case: Case, problem: Any, single: bool) -> Plan:
    if single:
        return make_plan(problem, "test", [(problem.graph.all_mask, 1)], MICROBATCH)
    if case.engine == "data_parallel":
        return DataParallel().plan(replace(problem, microbatch_size=2 * WORLD), lambda plan: pytest.fail("nothing to choose from"))
    parts = [(mask, 1) for mask in random_partition(problem.graph, case.stages, random.Random(case.seed))]
    devices = [*range(WORLD)] * (case.stages // WORLD)
    if case.down_and_up:
        devices = [*range(WORLD), *reversed(range(WORLD))]
    return make_plan(problem, "test", parts, MICROBATCH, ordered=True, placement=[(device,) for device in devices])


def one_device(case: Case, run_dir: Path) -> None:
    """Train the case's model on one device in this process."""
    make(case, run_dir, single=True)
    (run_dir / "ranks").mkdir(exist_ok=True)
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    harness = Harness(Job.load(run_dir), run_dir, rank=0, device_id=0, device=torch.device("cpu"))
    harness.run(WholeModel(harness, 1))
    torch.set_rng_state(state)
    assert torch.get_default_dtype() == default


def final(run_dir: Path) -> dict[str, torch.Tensor]:
    """Trained parameters and buffers by name; no controller has seen to the end of these workers."""
    assert finish_final(Job.load(run_dir), run_dir) or (run_dir / "checkpoints" / "final").is_dir()
    return load_final(run_dir)
