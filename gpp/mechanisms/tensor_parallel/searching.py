"""A planner's search with every operator split over t devices: teams of t neighbours are planned as one device each.

A team computes its share of each operator and waits for the sums inside it; it holds its share of the parameters and activations.
So the search runs on a view of the problem with the cluster's devices by teams, the graph's amounts by shares, and the times of the
bill at degree t. What it proposes is predicted as what it is: a plan whose stages are all split over t devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.cost.problem import Problem
from gpp.cost.variants import running, sums_s
from gpp.errors import Infeasible
from gpp.graph.op_graph import OpGraph, Variant
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, AbstractSearch, Predict
from gpp.quantities import seconds


class TensorParallelSearch(AbstractSearch):
    """Whole operators, and all operators split over each number of devices that is declared."""

    def plan(self, planner: AbstractPlanner, problem: Problem, predict: Predict) -> Plan:
        found: dict[int, tuple[Plan, float]] = {}
        lacking: Infeasible | None = None
        try:
            plan = planner.plan(problem, predict)
            found[1] = plan, predict(plan).metrics.iteration_s
        except Infeasible as error:
            lacking = error
        for split in splits(problem):
            with contextlib.suppress(Infeasible):
                plan = split.expand(planner.plan(split.view, split.predicted(predict)))
                plan.validate(problem)
                found[split.degree] = plan, predict(plan).metrics.iteration_s
        if not found:
            raise lacking or Infeasible("no plan fits", "more devices or memory")
        best = min(found, key=lambda degree: (found[degree][1], degree))
        tried = ", ".join(f"{seconds(took)} with {degree}" for degree, (_, took) in sorted(found.items()))
        plan = found[best][0]
        if len(found) == 1:
            return plan
        line = f"tensor parallelism: devices for each operator, {tried}; {best} is best"
        return replace(plan, explanation=(*plan.explanation, line))


SEARCH = TensorParallelSearch()


@final
class Split:
    """A problem whose devices are teams of `degree`.

    `view` is what planners search; `expand` makes a plan of the problem itself from one of the view.
    """

    def __init__(self, problem: Problem, degree: int) -> None:
        self.problem, self.degree = problem, degree
        cluster = problem.cluster
        teams = replace(cluster, devices=cluster.devices[::degree], nodes=cluster.nodes[::degree], hosts=())
        self.view = replace(
            problem, graph=_shared(problem.graph, degree), cluster=teams, cost=_OfTeams(problem.cost, problem, degree)
        )

    def expand(self, plan: Plan) -> Plan:
        """The plan of the problem in which each device of the view is a team."""
        t = self.degree
        stages = tuple(
            replace(stage, devices=tuple(t * d + i for d in stage.devices for i in range(t))).having(TensorParallel(degree=t))
            for stage in plan.stages
        )
        return replace(plan, stages=stages, graph_fingerprint=self.problem.graph.fingerprint)

    def predicted(self, predict: Predict) -> Predict:
        """The prediction of a plan of the view: that of the plan which it stands for."""
        return lambda plan: predict(self.expand(plan))


def splits(problem: Problem) -> Iterator[Split]:
    """The degrees at which the whole model can be split: all operators declare them, and teams fit into the nodes.

    A weight that several operators read could be cut from one of its readers, so none may be.
    """
    graph, cluster = problem.graph, problem.cluster
    degrees = set.intersection(*({v.degree for v in op.variants if not v.recompute} for op in graph.ops)) - {1}
    shared = any(readers.bit_count() > 1 for readers in graph.readers.values())
    if not problem.shares_operators or not cluster.homogeneous or shared:
        return
    for degree in sorted(degrees):
        teams = [cluster.nodes[i : i + degree] for i in range(0, cluster.num_devices, degree)]
        if all(len(team) == degree and len(set(team)) == 1 for team in teams):
            yield Split(problem, degree)


def _shared(graph: OpGraph, degree: int) -> OpGraph:
    """The graph as one member of a team holds it."""
    ways = [running(graph, op, 0.0, 0.0, False, degree) for op in range(graph.num_ops)]
    ops = tuple(replace(op, saved_bytes=way.saved_bytes, variants=()) for op, way in zip(graph.ops, ways, strict=True))
    share = {name: way.params for op, way in zip(graph.ops, ways, strict=True) for name in op.params}
    params = tuple(replace(param, num_bytes=round(param.num_bytes * share.get(param.name, 1.0))) for param in graph.params)
    return replace(graph, ops=ops, params=params)


@final
@dataclass(frozen=True, slots=True)
class _OfTeams(AbstractDerived):
    """Times of a team: each member's share of an operator, and the sums inside it."""

    problem: Problem
    degree: int

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        problem, ops = self.problem, range(graph.num_ops)
        times = problem.op_times(samples, 0, self.degree)
        ways = [
            running(problem.graph, op, float(times.forward_s[op]), float(times.backward_s[op]), False, self.degree) for op in ops
        ]
        cluster, team, variants = problem.cluster, tuple(range(self.degree)), [way.variant or Variant() for way in ways]
        forward = [way.forward_s + sums_s(cluster, v.forward_sums, samples, team) for way, v in zip(ways, variants, strict=True)]
        backward = [way.backward_s + sums_s(cluster, v.backward_sums, samples, team) for way, v in zip(ways, variants, strict=True)]
        return OpTimes(forward_s=np.array(forward), backward_s=np.array(backward), weight_s=times.weight_s)
