"""The nearest plan that an engine can run, planned under its own rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from gpp.errors import GppError, Infeasible, InvalidConfig
from gpp.export.base import AbstractExporter, ToExport
from gpp.export.modules import Modules
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
    from gpp.cost.models.profiled import Profiled

    graph = Modules.of(e.captured).graph
    # Operators were timed for another graph; by its amounts any graph has a time.
    cost = e.problem.cost
    if isinstance(cost, Profiled) and cost.profile_of(graph, e.problem.cluster.devices[0]) is None:
        cost = e.problem.cost.fallback or cost
    return replace(e, problem=replace(e.problem, graph=graph, cost=cost))


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
