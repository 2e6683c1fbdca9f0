"""The best plan of a mid-size graph by constraint programming, with a proven bound (OR-Tools' CP-SAT, optional).

Objective: the predicted iteration time. The solver minimises, for every micro-batch size b, a linear relaxation of it:
over all stages the M = B / b micro-batches, and the stage's reductions and updates, or the way to it and back with those where the
way begins; the same with a round trip through everything behind in place of M - 1 backwards; and the work of all stages over all
devices.
Transfers are left out, and amounts are rounded down, so what the solver proves of its objective holds for the prediction.

Constraints (of the model; stages are numbered 0 to K - 1, K the smaller of operators and devices):
1. Every operator is in one stage with one number of replicas r, which divides b: `_PartitionModel.assign`.
2. Along every tensor the stage's number does not fall, which makes stages convex and their graph acyclic: `_PartitionModel.assign`.
3. Devices: the replicas of all stages fit the cluster: `_PartitionModel.assign`.
4. The way to a stage and back, and depth, follow the stages between which a tensor goes: `_PartitionModel.ways`.
5. Memory: weights, gradients, optimizer state, and saved activations of min(depth, M) micro-batches: `_PartitionModel.memory`.
   Border tensors are left out, so a solution may not fit; it is then not a candidate.

Every solution on the solver's way is validated and predicted; the plan with the best prediction is returned. The solver starts
from `graphpipe`'s without shared devices, and where `graphpipe`'s with them is faster than all solutions, that one is returned.
The bound is the smallest over all b of the larger of the solver's and `lower_bound`'s; it is for plans with one micro-batch size
for all stages, and one stage for each device.

Complexity: exponential. Limited by deterministic time, so that the same input gives the same plan: one worker, fixed seed.

Departures: none; there is no publication. On devices of unequal speed the model takes the fastest for all: still a bound.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.bounds.bound_tables import BoundTables
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.planners.graphpipe.colocate import Colocate
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.settings import Count, settings

UNITS = 20_000
"""The best known time in the solver's integer units."""


@final
@settings("strategy.planner")
class Optimal(AbstractPlanner):
    """Convex partitions with one micro-batch size, by CP-SAT.

    Args:
        replication: whether a stage may be replicated.
        max_replicas: of a stage; None for as many as there are devices.
        colocate: whether `graphpipe`'s plans whose devices hold several stages count, too: as there.
        limit: deterministic seconds of search over all micro-batch sizes; a core needs about as many real ones.
        max_ops, max_devices: larger problems are refused.
    """

    proves: ClassVar[bool] = True

    replication: bool = True
    max_replicas: Count | None = None
    colocate: Colocate = "auto"
    limit: Count = 20
    max_ops: Count = 40
    max_devices: Count = 16

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        cp_model = _solver()
        for field, have, most in (
            ("graph.max_ops", problem.graph.num_ops, self.max_ops),
            ("cluster.num_devices", problem.cluster.num_devices, self.max_devices),
        ):
            if have > most:
                raise InvalidConfig(field, have, f"the optimal planner takes at most {most}", "use strategy/planner=graphpipe")
        if most := self.max_replicas if self.replication else 1:
            problem = replace(problem, max_replicas=min(most, problem.max_replicas or most))
        best = GraphPipe(replication=self.replication, colocate="never").plan(problem, predict)
        best_s = predict(best).metrics.iteration_s
        least = {b: _bound_s(replace(problem, microbatch_size=b)) for b in problem.microbatch_sizes()}
        proven, left = 0, float(self.limit)
        order = sorted(least, key=lambda b: (least[b], b))
        for i, b in enumerate(order):
            if least[b] >= best_s:
                proven += 1
                continue
            model = _PartitionModel(cp_model, problem, b, least[b], best_s)
            if {stage.microbatch_size for stage in best.stages} == {b}:
                model.hint(best)
            solved, spent = model.solve(left / (len(order) - i))
            left = max(left - spent, 0.1)
            proven += solved
            for plan in model.plans():
                try:
                    plan.validate(problem)
                except Infeasible:
                    continue
                seconds = predict(plan).metrics.iteration_s
                if seconds < best_s * (1 - 1e-9):
                    best, best_s = plan, seconds
            least[b] = max(least[b], model.bound_s)
        bound_s = min(best_s, *least.values())
        gap = 100 * (best_s / bound_s - 1) if bound_s > 0 else 0.0
        lines = [
            f"CP-SAT over convex partitions with one micro-batch size: {proven} of {len(least)} sizes searched to the end"
            + ("" if proven == len(least) else "; strategy.planner.limit=SECONDS searches longer"),
            f"proven: no such plan is predicted under {bound_s:.6g} s; the best of them is at most {gap:.1f} % above the optimum",
        ]
        if self.colocate == "never":
            return replace(best, planner="optimal", explanation=tuple(lines))
        shared = GraphPipe(replication=self.replication, colocate=self.colocate).plan(problem, predict)
        if (shared_s := predict(shared).metrics.iteration_s) < best_s * (1 - 1e-9):
            lines.append(f"this one is graphpipe's, {100 * (1 - shared_s / best_s):.1f} % faster: its devices hold several stages")
            best = shared
        return replace(best, planner="optimal", explanation=tuple(lines))


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InvalidConfig(
            "strategy.planner", "optimal", "needs OR-Tools, which is not installed", "pip install -e '.[exact]'"
        ) from None
    return cp_model


def _bound_s(problem: Problem) -> float:
    """The lower bound of one micro-batch size; infinite if nothing fits."""
    try:
        return lower_bound(problem).iteration_s
    except Infeasible:
        return float("inf")


class _PartitionModel:
    """The model for one micro-batch size; times in units of a share of the best known time, rounded down."""

    def __init__(self, cp_model: Any, problem: Problem, b: int, least_s: float, best_s: float) -> None:
        self.cp, self.problem, self.b, self.unit = cp_model, problem, b, best_s / UNITS
        self.tables = BoundTables.of(replace(problem, microbatch_size=b))
        self.graph, self.micro = problem.graph, problem.minibatch_size // b
        self.replicas = self.tables.replicas[:, 0].astype(int).tolist()
        self.count = min(problem.graph.num_ops, problem.cluster.num_devices)
        self.model = cp_model.CpModel()
        self.solutions: list[list[tuple[int, int]]] = []
        self.bound_s = least_s
        # A solution as slow as the best plan is of no use, but must stay allowed for the hint.
        self.time = self.model.new_int_var(math.floor(least_s / self.unit), UNITS, "time")
        self.assign()
        self.ways()
        self.memory()
        self.model.minimize(self.time)

    def scaled(self, seconds: np.ndarray) -> list[list[int]]:
        return np.floor(seconds / self.unit * (1 - 1e-12)).astype(int).tolist()

    def assign(self) -> None:
        """Constraints 1 to 3, and the work of all stages."""
        m, ops, stages, rows = self.model, range(self.graph.num_ops), range(self.count), range(len(self.replicas))
        self.chosen = [[m.new_bool_var(f"r{s},{c}") for c in rows] for s in stages]
        self.where = [[[m.new_bool_var(f"x{o},{s},{c}") for c in rows] for s in stages] for o in ops]
        self.inside = [[m.new_bool_var(f"i{o},{s}") for s in stages] for o in ops]
        fits = self.tables.fits
        for s in stages:
            m.add_at_most_one(self.chosen[s])
            if s:
                m.add(sum(self.chosen[s]) <= sum(self.chosen[s - 1]))
            m.add(sum(self.inside[o][s] for o in ops) >= sum(self.chosen[s]))
        for o in ops:
            m.add_exactly_one(self.inside[o])
            for s in stages:
                m.add(sum(self.where[o][s]) == self.inside[o][s])
                for c in rows:
                    m.add_implication(self.where[o][s][c], self.chosen[s][c])
                    if not fits[c, o]:
                        m.add(self.where[o][s][c] == 0)
        for a in ops:
            for b in ops:
                if self.graph.successors[a] >> b & 1:
                    for s in stages[1:]:
                        # b in a stage before s puts a there, too.
                        m.add(sum(self.inside[b][:s]) <= sum(self.inside[a][:s]))
        m.add(sum(r * self.chosen[s][c] for s in stages for c, r in enumerate(self.replicas)) <= self.problem.cluster.num_devices)
        t = self.tables
        work = self.scaled(t.replicas * (t.micro * (t.forward + t.backward) + t.finish / t.slowest) / t.capacity)
        m.add(self.time >= sum(work[c][o] * self.where[o][s][c] for o in ops for s in stages for c in rows))

    def total(self, table: list[list[int]], s: int) -> Any:
        """The sum over the operators of a stage."""
        return sum(
            table[c][o] * self.where[o][s][c] for o in range(self.graph.num_ops) for c in range(len(self.replicas)) if table[c][o]
        )

    def ways(self) -> None:
        """Constraint 4 and the objective's parts for each stage."""
        m, stages = self.model, range(self.count)
        names = ("way", "trip", "f", "g", "e")
        self.way, self.trip, forward, backward, finish = ([m.new_int_var(0, UNITS, f"{name}{s}") for s in stages] for name in names)
        t = self.tables
        for s in stages:
            for variable, table in ((forward, t.forward), (backward, t.backward), (finish, t.finish)):
                m.add(variable[s] == self.total(self.scaled(table), s))
            m.add(self.trip[s] >= forward[s] + backward[s])
            busy = self.micro * (forward[s] + backward[s])
            m.add(self.time >= busy + finish[s])
            m.add(self.time >= busy + self.way[s])
            for passes in (forward, backward):
                m.add(self.time >= (self.micro - 1) * passes[s] + self.trip[s] + self.way[s])
        pairs = {(x.producer, c): False for x in self.graph.tensors for c in x.consumers}
        pairs |= {(x.producer, c): True for x in self.graph.tensors if x.differentiable for c in x.consumers}
        self.edges = {}
        for s in stages:
            for u in range(s + 1, self.count):
                data, back = m.new_bool_var(f"d{s},{u}"), m.new_bool_var(f"b{s},{u}")
                self.edges[s, u] = data
                m.add_implication(back, data)
                for (a, c), returns in pairs.items():
                    m.add_bool_or([self.inside[a][s].negated(), self.inside[c][u].negated(), back if returns else data])
                m.add(self.way[u] >= self.way[s] + forward[s] + backward[s]).only_enforce_if(back)
                m.add(self.way[u] >= finish[s] + forward[s] + backward[s]).only_enforce_if(back)
                m.add(self.trip[s] >= self.trip[u] + forward[s] + backward[s]).only_enforce_if(back)

    def memory(self) -> None:
        """Constraint 5: one bound for each depth that a stage may have."""
        m, t, stages = self.model, self.tables, range(self.count)
        most = max(device.memory_bytes for device in self.problem.cluster.devices)
        unit = most / 1e6
        deepest = 1 if self.problem.regime.keeps_all else min(self.micro, self.count)
        deep = [[m.new_bool_var(f"deep{s},{d}") for d in range(deepest)] for s in stages]
        for s in stages:
            for d in range(deepest):
                held = self.problem.regime.held(d + 1, self.micro)
                table = np.floor(t.memory.peak(held) / unit * (1 - 1e-12)).astype(int).tolist()
                limit = m.add(self.total(table, s) <= 1_000_000)
                if d:
                    limit.only_enforce_if(deep[s][d])
                    for u in range(s + 1, self.count):
                        m.add_bool_or([self.edges[s, u].negated(), deep[u][d - 1].negated(), deep[s][d]])
                else:
                    m.add(deep[s][0] == 1)

    def hint(self, plan: Plan) -> None:
        """Start from a plan's stages."""
        for o in range(self.graph.num_ops):
            for s in range(self.count):
                self.model.add_hint(self.inside[o][s], int(s < len(plan.stages) and o in plan.stages[s].ops))
        for s in range(self.count):
            for c, r in enumerate(self.replicas):
                self.model.add_hint(self.chosen[s][c], int(s < len(plan.stages) and len(plan.stages[s].devices) == r))

    def solve(self, limit: float) -> tuple[bool, float]:
        """Search; whether it came to its end, and the deterministic time that it took."""
        model = self

        class Collect(self.cp.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                model.solutions.append(model.parts(self.boolean_value))

        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = limit
        status = solver.solve(self.model, Collect())
        if status == self.cp.INFEASIBLE:
            # Nothing under the best known time.
            self.bound_s = UNITS * self.unit
        else:
            self.bound_s = max(self.bound_s, math.floor(solver.best_objective_bound) * self.unit)
        return status in (self.cp.OPTIMAL, self.cp.INFEASIBLE), solver.response_proto.deterministic_time

    def parts(self, value: Any) -> list[tuple[int, int]]:
        out = []
        for s in range(self.count):
            ops = [o for o in range(self.graph.num_ops) if value(self.inside[o][s])]
            if ops:
                out.append((mask_of(ops), next(r for c, r in enumerate(self.replicas) if value(self.chosen[s][c]))))
        return out

    def plans(self) -> list[Plan]:
        """The plans of all solutions, the best ones of the model first."""
        out = []
        for parts in reversed(self.solutions):
            try:
                out.append(make_plan(self.problem, "optimal", parts, self.b))
            except InvalidPlan:
                continue
        return out
