"""The small networks with a stage for each of their submodules s0, s1, ...: capture, stages, problem, data and schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from gpp import GPipe, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.data.base import AbstractData
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph, bits
from gpp.optimizers import SGD, AbstractOptimizer
from gpp.plan.build import make_plan
from gpp.runtime.job import Job
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.small import Small

MINIBATCH = 16
DATA = Synthetic(num_samples=48, num_test_samples=8)
OPTIMIZER = SGD(lr=0.3, momentum=0.9)
SCHEDULES: dict[str, tuple[AbstractSchedule, int]] = {"GPipe": (GPipe(), 1), "1F1B": (OneFOneB(), 1), "2F2B": (OneFOneB(), 2)}


@cache
def captured(network: str) -> tuple[Small, Captured, dict[str, torch.Tensor]]:
    model = Small(kind=network, **({"loss": "tests.support.small.half_squares"} if network == "Springs" else {}))
    return model, *inprocess.capture(model)


def parts_of(graph: OpGraph) -> list[int]:
    """Masks of the stages: an operator of submodule sN goes to stage N, any other to the last stage that it reads from."""
    part: list[int] = []
    for i, op in enumerate(graph.ops):
        head = op.name.split(".")[0]
        before = [part[p] for p in bits(graph.predecessors[i])]
        part.append(int(head[1:]) if head[0] == "s" and head[1:].isdigit() else max(before))
    return [sum(1 << i for i, p in enumerate(part) if p == s) for s in range(max(part) + 1)]


def problem_of(found: Captured, schedule: AbstractSchedule, num_devices: int) -> Problem:
    base = inprocess.problem_of(found, num_devices, MINIBATCH, regime=Regime(holds=schedule.holds))
    # As captured: a coarser graph would not keep the submodules apart.
    return Problem(
        **{**{name: getattr(base, name) for name in ("cluster", "cost", "minibatch_size", "regime")}, "graph": found.graph}
    )


def job_of(
    network: str,
    schedule: AbstractSchedule,
    *,
    sizes: int | Sequence[int] = 4,
    replicas: Sequence[int] | None = None,
    where: Sequence[tuple[int, ...]] | None = None,
    order: Sequence[int] | None = None,
    minibatch_size: int = MINIBATCH,
    planned: Callable[[Plan], Plan] = lambda plan: plan,
    optimizer: AbstractOptimizer = OPTIMIZER,
    data: AbstractData = DATA,
    steps: int = 2,
    settings: dict[str, Any] | None = None,
    **of_plan: Any,
) -> tuple[Job, dict[str, torch.Tensor]]:
    """The job of a network, a stage for each submodule, in float64; and its initial weights.

    Args:
        sizes: micro-batch of each stage, or of all.
        replicas: devices of each stage; one each by default.
        where: the devices themselves.
        order: how the stages are numbered.
        planned: changes the plan.
        settings: further ones of the job.
        of_plan: as of `make_plan`.
    """
    model, found, weights = captured(network)
    masks = parts_of(found.graph)
    counts = [len(devices) for devices in where] if where else replicas or [1] * len(masks)
    world = 1 + max(device for devices in where for device in devices) if where else sum(counts)
    problem = replace(problem_of(found, schedule, world), minibatch_size=minibatch_size)
    parts = list(zip(masks, counts, strict=True))
    numbered, own = [parts[s] for s in order or range(len(parts))], sizes if isinstance(sizes, int) else list(sizes)
    plan = planned(make_plan(problem, "test", numbered, own, ordered=True, placement=where, **of_plan))
    made = {"model": model, "data": data, "optimizer": optimizer, "steps": steps, **(settings or {})}
    return inprocess.make_job(found, problem, plan, schedule, **made), weights
