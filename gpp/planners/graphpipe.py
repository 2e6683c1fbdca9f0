"""GraphPipe (Jeon et al., ASPLOS '25): stages that form a DAG, so that branches run side by side.

The mode that the paper evaluates: one micro-batch size b for all stages, swept; k = 1 (1F1B).

Objective: the predicted iteration time. The paper minimises the slowest stage's time per sample and
prefers less memory; here that search makes the candidates, and the prediction, which has the bubbles
in it, decides among them.

Constraints (paper, section 3):
1. C1: stages are convex and partition the operators: every split is along the series-parallel order,
   `Structure.splits_of`; `sp_aligned.splits` lists the same for small graphs.
2. C2: stage edges are the tensors between stages, nothing else: `make_plan`.
3. C3: stages hold disjoint devices, as contiguous ranges in stage order: `make_plan`.
4. A stage has r replicas, r a divisor of b: `StageCosts.replicas`.
5. Eq. 2: memory, with as many micro-batches in flight as the stage's depth, capped at the mini-batch:
   `StageCosts.max_depth` in the search, `Assessor` for the finished candidate on its own devices.
6. Bottleneck: no stage takes longer than the limit for a micro-batch: compute or its transfers, which overlap,
   and its share of the all-reduce and update at the end (`StageCosts.options`, `PartitionSearch._stage`).

Steps of `GraphPipe.plan`, taken once with replicas, if they are allowed, and once without; the better result counts:
1. the chains of `sequential`, as a chain and with the data edges only (a chain is a partition too, so
   the result is never predicted slower than `sequential`'s under equal settings); of a graph that is
   not series-parallel also cuts of the order in which each branch comes before what joins it;
2. for every b whose bound can still win: the smallest feasible bottleneck by bisection (1 %), then
   limits of up to twice that, since a shallower pipeline may finish sooner (`_bottlenecks`);
3. candidates in the order of a lower bound on their iteration time, simulated until none can win;
4. graphs small enough: every aligned partition and every chain with every device split, while the
   bound can win (`_complete`), so that there the result is the optimum of the planner's space.
   Otherwise the best plan is refined step by step: borders, replicas, micro-batch size (`refine`).

Complexity: per b and limit O(S h e) with S pairs (set, split) that the series-parallel order has (for w
branches of n operators of equal signature O(n^3), independent of w), h depths and e entries of a front.

Departures from the paper:
* the score is the prediction, not the bottleneck; the two agree when the bubble does not matter;
* replicas: any divisor of b, not only powers of two; devices may stay idle;
* absorb-join and absorb-fork are explicit (the paper implies them); whole groups of branches may be absorbed;
* more than 128 ways to count branches by class: only neighbouring classes are grouped into one stage;
* graphs that are not series-parallel get added dependencies for the search only, in two ways (the shortest
  critical path; whole towers); the plan keeps the graph's own edges;
* a heterogeneous cluster is searched as if all devices were its slowest and smallest, then judged as it is;
* the depth counts the stage that holds the join, which the paper's case study does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from gpp.cost.problem import Problem
from gpp.graph.series_parallel import Dependency, Order, branch_barrier, critical_path, series_parallel_order
from gpp.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict, check_at_least
from gpp.planners.candidates import Assessor, Candidate, Parts, Search
from gpp.planners.chains import branch_first_order, depth_first_order
from gpp.planners.infeasible import explain
from gpp.planners.partition_search import PartitionSearch, Structure
from gpp.planners.refine import refine
from gpp.planners.sequential import chain_candidates, climb_chains, with_and_without
from gpp.planners.sp_aligned import TooMany, partitions
from gpp.planners.stage_costs import StageCosts

LIMITS = (1.05, 1.1, 1.25, 1.5, 2.0)
"""Larger bottlenecks to try, in units of the smallest feasible one."""

LENIENT = (1.4, 2.0)
"""Factors on the memory that the searches are shown. They may overestimate depths (a chain run with its
data edges only, added dependencies, absorbed joins); the finished candidate is judged at the true memory."""

PRECISION = 1.01
"""The smallest feasible bottleneck is searched up to this factor."""


class _Found(NamedTuple):
    """A finished search, and whether it saw the whole space."""

    search: Search
    complete: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPipe(AbstractPlanner):
    """Best DAG of stages along the series-parallel structure of the graph.

    Args:
        replication: whether a stage may be replicated.
        patience: simulations without a better plan after which a step of the search goes on to the next.
        max_candidates: partitions that may be listed, and candidates judged, to complete the search; 0 leaves that out.
    """

    replication: bool = True
    patience: int = 6
    max_candidates: int = 20_000

    def __post_init__(self) -> None:
        check_at_least("patience", self.patience, 1)
        check_at_least("max_candidates", self.max_candidates, 0)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        graph, tables = problem.graph, with_and_without(problem, self.replication)
        weights = tables[0].op_seconds()
        _, added, order = series_parallel_order(graph, weights)
        orders = [order, series_parallel_order(graph, weights, branch_barrier)[2]] if added else [order]
        found = [self._search(problem, predict, costs, orders) for costs in tables]
        best = min(found, key=lambda each: each.search.best_s)
        if best.search.best is None:
            structure = Structure(graph, order, tables[0].labels())
            raise explain(problem, lambda other, memory_scale: self._attempt(structure, other, memory_scale))
        simulated = sum(each.search.num_simulated for each in found)
        return replace(best.search.best, explanation=_explanation(best, simulated, added, order))

    def _search(self, problem: Problem, predict: Predict, costs: StageCosts, orders: list[Order]) -> _Found:
        """Steps 1 to 4, with one set of allowed replicas."""
        assessor, graph = Assessor(costs), problem.graph
        search = Search(assessor, "graphpipe", predict)
        self._unchained(search, climb_chains(search, self.patience))
        if len(orders) > 1:
            self._unchained(search, chain_candidates(assessor, order=branch_first_order(graph)))
        for each in orders:
            self._bottlenecks(PartitionSearch(Structure(graph, each, costs.labels()), costs), search)
        complete = self._complete(orders, search)
        for memory_scale in LENIENT if not complete and costs.memory_binds() else ():
            lenient = StageCosts(problem, replication=costs.replication, memory_scale=memory_scale)
            self._unchained(search, chain_candidates(Assessor(lenient)))
            if search.best is None:
                self._bottlenecks(PartitionSearch(Structure(graph, orders[0], costs.labels()), lenient), search)
        if search.best is not None and not complete:
            refine(search, self.patience)
        return _Found(search, complete)

    def _unchained(self, search: Search, chains: list[Candidate]) -> None:
        """Step 1: the chains' stages with the data edges only."""
        found = (search.assessor.assess(c.parts, c.microbatch_size) for c in chains)
        search.simulate_all([c for c in found if isinstance(c, Candidate)], self.patience)

    def _bottlenecks(self, partition_search: PartitionSearch, search: Search) -> None:
        """Step 2 and 3: candidates of the dynamic program, micro-batch size by micro-batch size."""
        costs, minibatch_size = partition_search.costs, search.assessor.problem.minibatch_size
        floor = {b: _bottleneck_floor(costs, b) for b in costs.microbatch_sizes}
        for b in sorted(floor, key=lambda b: (minibatch_size // b * floor[b], b)):
            pool: dict[Parts, Candidate] = {}
            for parts in _partitions_by_bottleneck(partition_search, search, b, floor[b]):
                candidate = search.assessor.assess(parts, b)
                if isinstance(candidate, Candidate):
                    pool[candidate.parts] = candidate
            search.simulate_all(list(pool.values()), self.patience)

    def _complete(self, orders: list[Order], search: Search) -> bool:
        """Step 4: everything else in the planner's space; False if that is too much."""
        costs, graph = search.assessor.costs, search.assessor.graph
        if 2 ** (graph.num_ops - 1) > self.max_candidates:  # as many chains alone
            return False
        try:
            aligned = {p: None for order in orders for p in partitions(order, graph.all_mask, self.max_candidates)}
        except TooMany:
            return False
        linear = list(_intervals(depth_first_order(graph)))
        if len(orders) > 1:
            aligned |= dict.fromkeys(frozenset(p) for p in _intervals(branch_first_order(graph)))
        left, pool = self.max_candidates, []
        for b in costs.microbatch_sizes:
            spaces: Iterator[tuple[tuple[int, ...], bool]] = itertools.chain(
                ((tuple(sorted(p)), False) for p in aligned),
                ((p, False) for p in linear if frozenset(p) not in aligned),
                ((p, True) for p in linear),
            )
            for masks, chain in spaces:
                for counts in _device_splits(search, masks, b):
                    left -= 1
                    if left < 0:
                        return False
                    candidate = search.assessor.assess(tuple(zip(masks, counts, strict=True)), b, chain=chain)
                    if isinstance(candidate, Candidate) and search.worth(candidate.bound_s):
                        pool.append(candidate)
        search.simulate_all(pool)
        return True

    def _attempt(self, structure: Structure, problem: Problem, memory_scale: float) -> Candidate | None:
        """Any candidate that fits, for the explanation of an infeasible problem."""
        costs = StageCosts(problem, replication=self.replication, memory_scale=memory_scale)
        assessor = Assessor(costs)
        search = PartitionSearch(structure, costs)
        for b in _sizes_that_save_memory(problem):
            for entry in search.solve(b, float("inf")):
                candidate = assessor.assess(search.parts(entry.layout), b)
                if isinstance(candidate, Candidate):
                    return candidate
        return next(iter(chain_candidates(assessor, any_one=True)), None)


def _sizes_that_save_memory(problem: Problem) -> list[int]:
    """Micro-batch sizes outside of which nothing fits if nothing fits inside.

    One sample at a time on unreplicated stages keeps least, unless the mini-batch has fewer
    micro-batches than a pipeline may be deep: then replicas share fewer samples.
    """
    sizes = problem.microbatch_sizes()
    deepest = min(problem.cluster.num_devices, problem.graph.num_ops)
    return [b for b in sizes if b == sizes[0] or problem.in_flight == "all" or problem.minibatch_size // b < deepest]


def _bottleneck_floor(costs: StageCosts, b: int) -> float:
    """No partition has a faster slowest stage: all devices always busy; the slowest operator alone."""
    every = costs.graph.all_mask
    spread = costs.least_work_s(every, b) / costs.cluster.num_devices
    alone = max(min(costs.compute_s(1 << op, b // r) for r in costs.replicas[b]) for op in range(costs.graph.num_ops))
    return max(spread, alone)


def _partitions_by_bottleneck(
    partition_search: PartitionSearch, search: Search, b: int, floor_s: float
) -> Iterator[list[tuple[int, int]]]:
    """Partitions on the way to the smallest feasible bottleneck, and at larger limits."""
    num_microbatches = search.assessor.problem.minibatch_size // b
    low, best = floor_s, None
    total = search.assessor.costs.compute_s(search.assessor.graph.all_mask, b)
    # What cannot beat the best plan at all is settled by one run; without a best plan the limit is raised from below.
    limit = floor_s * PRECISION if search.best is None else search.best_s / num_microbatches
    while best is None or best > low * PRECISION:
        if not search.worth(num_microbatches * low):
            return
        front = partition_search.solve(b, limit)
        for entry in front:
            yield partition_search.parts(entry.layout)
        if front:
            best = min(entry.bottleneck_s for entry in front)
        elif limit == float("inf"):
            return
        else:
            low = limit
        limit = (low * best) ** 0.5 if best else low * 1.3 if low < 2 * total else float("inf")
    previous = best
    for factor in LIMITS:
        if search.worth(num_microbatches * previous):
            previous = best * factor
            for entry in partition_search.solve(b, previous):
                yield partition_search.parts(entry.layout)


def _intervals(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ways to cut a linear order into intervals, as tuples of masks in order."""
    n = len(order)
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        ends = (0, *cuts, n)
        yield tuple(sum(1 << op for op in order[i:j]) for i, j in itertools.pairwise(ends))


def _device_splits(search: Search, masks: tuple[int, ...], b: int) -> Iterator[tuple[int, ...]]:
    """Numbers of replicas of each stage that fit the cluster and could win."""
    costs = search.assessor.costs
    num_devices = costs.cluster.num_devices
    if len(masks) > num_devices:
        return
    num_microbatches = costs.problem.minibatch_size // b
    if costs.cluster.homogeneous:
        choices = [
            [o.num_replicas for o in costs.options(mask, b) if search.worth(num_microbatches * o.compute_s)] for mask in masks
        ]
    else:
        choices = [list(costs.replicas[b]) for _ in masks]
    spare = num_devices - sum(min(c, default=num_devices + 1) for c in choices)
    if spare < 0:
        return
    limited = [[r for r in c if r - c[0] <= spare] for c in choices]
    for counts in itertools.product(*limited):
        if sum(counts) <= num_devices:
            yield counts


def _is_chain(search: Search, plan: Plan) -> bool:
    """Whether the plan has order edges."""
    return any(not tensors for tensors in plan.edge_tensors(search.assessor.graph).values())


def _explanation(found: _Found, simulated: int, added: tuple[Dependency, ...], order: Order) -> tuple[str, ...]:
    search, graph, best = found.search, found.search.assessor.graph, found.search.best
    assert best is not None
    lines = [
        f"{len(best.stages)} stages of depth {best.depth} on {best.num_devices} devices, "
        f"micro-batch {best.stages[0].microbatch_size}; {simulated} candidates simulated",
        "every partition of the planner's space was considered"
        if found.complete
        else "the space is too large to list: dynamic program over bottlenecks, then refinement",
    ]
    if added:
        weights = search.assessor.costs.op_seconds()
        before, after = (critical_path(o, graph.all_mask, weights) for o in (Order.of(graph), order))
        names = ", ".join(f"{graph.ops[d.before].name} before {graph.ops[d.after].name}" for d in added[:3])
        lines.append(
            f"the graph is not series-parallel: {len(added)} dependencies added for the search ({names}"
            f"{', ...' if len(added) > 3 else ''}); critical path {100 * (after / before - 1) if before else 0.0:+.1f} %; "
            "the plan itself keeps the graph's own edges"
        )
    if _is_chain(search, best):
        lines.append("the best plan is a chain")
    return tuple(lines)
