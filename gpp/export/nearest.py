"""The nearest plan that an engine can run, planned under its own rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.errors import GppError, Infeasible, InvalidConfig
from gpp.export.base import AbstractExporter, ToExport
from gpp.export.modules import Modules
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.planners.chains.sequential import Sequential
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy


def by_modules(e: ToExport) -> ToExport:
    """The same problem with an operator for each module of the model, and a plan to be made.

    Raises:
        UnsupportedPlan: the model is a profile.
        InvalidConfig: a module is not one piece.
    """
    modules = Modules.of(e.captured)
    cost = ModuleCost(e.problem.cost, e.problem.graph, _shares(modules.graph, e.problem.graph, e.captured.graph))
    return replace(e, problem=replace(e.problem, graph=modules.graph, cost=cost))


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCost(AbstractDerived):
    """The times of modules, from those of operators that may lie across them.

    Args:
        known: the graph whose operators have times.
        shares: [modules, operators] the share of each operator's time that a module has.
    """

    known: OpGraph
    shares: np.ndarray

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        found = self.cost.op_times(self.known, samples, device, degree)
        forward, backward, weight = (self.shares @ seconds for seconds in (found.forward_s, found.backward_s, found.weight_s))
        return OpTimes(forward_s=forward, backward_s=backward, weight_s=weight)

    def whole_ops(self, graph: OpGraph, device: Device) -> tuple[int, ...]:
        return ()


def _shares(modules: OpGraph, known: OpGraph, captured: OpGraph) -> np.ndarray:
    """By the FLOPs of the captured operators, and one for each kernel: what both have of each counts."""
    module_of, known_of = ({node: i for i, op in enumerate(graph.ops) for node in op.nodes} for graph in (modules, known))
    out = np.zeros((modules.num_ops, known.num_ops))
    for op in captured.ops:
        for node in op.nodes[:1]:
            out[module_of[node], known_of[node]] += op.forward_flops + op.backward_flops + op.num_kernels
    whole = out.sum(axis=0)
    return out / np.where(whole > 0, whole, 1.0)


def nearest(e: ToExport, exporter: AbstractExporter) -> ToExport | None:
    """The plan with the shortest predicted step, as the engine runs it, that the engine can run; None where none was found.

    Tried are the strategy itself, told what the engine refuses, and the best chain without replicas, by 1F1B too.
    """
    found: list[tuple[float, ToExport]] = []
    for asked in _tries(e, exporter):

        def refuses(plan: Plan, asked: ToExport = asked) -> str | None:
            return exporter.why_not(asked.having(plan))

        with suppress(Infeasible, InvalidConfig):
            plan = asked.strategy.plan(replace(asked.problem, refuses=refuses))
            made = asked.having(plan)
            with suppress(GppError):
                found.append((exporter.exported(made).ran.step_s(), made))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _tries(e: ToExport, exporter: AbstractExporter) -> Iterator[ToExport]:
    """Problems with strategies, by the engine's rules."""
    posed = e
    if exporter.whole:
        try:
            posed = by_modules(e)
        except InvalidConfig:
            return
    chain = replace(e.strategy, planner=Sequential(replication=False))
    plain = Strategy(name=e.strategy.name, planner=Sequential(replication=False), schedule=OneFOneB())
    if not exporter.whole:
        yield posed
    yield replace(posed, strategy=chain)
    if e.strategy.schedule != plain.schedule and e.problem.regime.trains:
        yield replace(posed, strategy=plain)
