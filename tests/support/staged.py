"""The small networks with a stage for each of their submodules s0, s1, ...: capture, stages, problem, data and schedules."""

from __future__ import annotations

from functools import cache

import torch

from gpp import GPipe, OneFOneB
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph, bits
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.small import Small

MINIBATCH = 16
DATA = Synthetic(num_samples=48, num_test_samples=8)
SCHEDULES: dict[str, tuple[AbstractSchedule, int]] = {"GPipe": (GPipe(), 1), "1F1B": (OneFOneB(), 1), "2F2B": (OneFOneB(), 2)}


@cache
def captured(network: str) -> tuple[Small, Captured, dict[str, torch.Tensor]]:
    model = Small(kind=network)
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
