"""The nearest plan that an engine can run, planned under its own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.errors import GppError, InvalidConfig
from gpp.export.base import AbstractExporter, ToExport, ToPlanFor, ways
from gpp.export.modules import Modules
from gpp.export.ways import EngineWay
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.planners.chains.sequential import Sequential
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy


def by_modules(e: ToPlanFor) -> ToPlanFor:
    """The same problem with an operator for each module of the model.

    Raises:
        UnsupportedPlan: the model is a profile.
        InvalidConfig: a module is not one piece.
    """
    modules = Modules.of(e.captured)
    if modules.graph.fingerprint == e.problem.graph.fingerprint:
        return e
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


def nearest(e: ToPlanFor, exporter: AbstractExporter, *, others: bool = True) -> ToExport | None:
    """The plan with the shortest predicted step, as the engine runs it, that the engine can run; None where none was found.

    Tried are the strategy itself, told what the engine refuses, and the best chain for each way to use the devices and each order
    of passes that the engine has (`gpp.export.base.ways`).

    Args:
        others: whether to try orders of passes beside the strategy's own.
    """
    found: list[tuple[float, ToExport]] = []
    for asked, way in _tries(e, exporter, others=others):

        def made(plan: Plan, asked: ToPlanFor = asked, way: EngineWay = way) -> ToExport:
            return asked.having(replace(way.expand(plan), graph_fingerprint=asked.problem.graph.fingerprint))

        def refuses(plan: Plan, made: Callable[[Plan], ToExport] = made) -> str | None:
            return exporter.why_not(made(plan))

        with suppress(GppError):
            chosen = made(way.strategy.plan(replace(way.problem, refuses=refuses)))
            ran = exporter.exported(chosen).ran
            ran.plan.validate(ran.strategy.posed(ran.problem))
            found.append((ran.step_s(), chosen))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _tries(e: ToPlanFor, exporter: AbstractExporter, *, others: bool) -> Iterator[tuple[ToPlanFor, EngineWay]]:
    """Strategies by the engine's rules, with the ways to plan them."""
    posed = e
    if exporter.whole:
        try:
            posed = by_modules(e)
        except InvalidConfig:
            return
    else:
        yield posed, EngineWay(problem=posed.problem, strategy=posed.strategy, expand=lambda plan: plan)
    # Who asks for a pipeline gets no copies of one, either, or as few.
    planner, whole = e.strategy.planner, posed.problem
    most = 1 if getattr(planner, "replication", True) is False else getattr(planner, "max_replicas", None)
    if most is not None:
        posed = replace(posed, problem=replace(whole, max_replicas=min(most, whole.max_replicas or most)))
    chain = replace(e.strategy, planner=Sequential(replication=False))
    strategies = [chain]
    if others and e.problem.regime.trains:
        plain = Strategy(name=e.strategy.name, planner=chain.planner, schedule=OneFOneB())
        strategies += [replace(plain, schedule=own) for own in exporter.schedules if own != e.strategy.schedule]
    for strategy in strategies:
        asked = replace(posed, strategy=strategy)
        yield from ((asked, way) for way in ways(exporter, asked.problem, strategy))
