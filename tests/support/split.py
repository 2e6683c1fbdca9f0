"""Plans with stages whose operators are split over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpp.cost.problem import Problem
from gpp.graph.op_graph import OpGraph, mask_of
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan


def split_stages(problem: Problem, parts: Sequence[tuple[int, int, int]], microbatch_size: int) -> Plan:
    """A plan of stages (operator mask, replicas, devices of each replica), in a topological order."""
    plan = make_plan(problem, "test", [(mask, r * t) for mask, r, t in parts], microbatch_size, ordered=True)
    stages = [
        stage.having(TensorParallel(degree=t)) if t > 1 else stage for stage, (_, _, t) in zip(plan.stages, parts, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def named(graph: OpGraph, *prefixes: str) -> int:
    """Operators whose names begin with one of these."""
    return mask_of(i for i, op in enumerate(graph.ops) if op.name.startswith(prefixes))


def halves(graph: OpGraph, first: int) -> list[int]:
    """The first so many operators of a chain, and the others."""
    return [(1 << first) - 1, graph.all_mask & ~((1 << first) - 1)]
