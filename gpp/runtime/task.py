"""What an engine asks beside a plan before it says that it can run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpp.cost.problem import Problem
from gpp.graph.captured import Captured, is_loss
from gpp.graph.op_graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTask:
    """What an engine asks beside a plan before it says that it can run it.

    Args:
        graph: the operators that the plan cuts.
        losses: name of the loss, or of each of its terms -> the operator that makes it.
        clips: whether gradients are clipped by a norm.
        captured: the model; None where its graph is all that is known.
        kind: of the devices that workers compute on.
        whole_ops: operators whose backwards are not split, as measured (`gpp.runtime.job.Settings`).
    """

    graph: OpGraph
    losses: Mapping[str, int]
    clips: bool
    captured: Captured | None = None
    kind: str = "cpu"
    whole_ops: tuple[int, ...] = ()

    @classmethod
    def of(cls, captured: Captured, graph: OpGraph, **others: Any) -> EngineTask:
        """That of a captured model whose operators, coarse or not, are those of `graph`; `others`: the other fields."""
        op_of = {node: i for i, op in enumerate(graph.ops) for node in op.nodes}
        losses = {name: op_of[node] for name, node in captured.results.items() if is_loss(name)}
        return cls(graph=graph, losses=losses, captured=captured if captured.nodes else None, **others)

    @classmethod
    def of_problem(cls, captured: Captured, problem: Problem, *, clips: bool) -> EngineTask:
        """The task of a planning problem of a captured model."""
        device, graph = problem.cluster.devices[0], problem.graph
        return cls.of(captured, graph, clips=clips, kind=device.kind, whole_ops=problem.cost.whole_ops(graph, device))
