"""The oracle of the tests: everything in a space, scored by prediction.

Objective: the predicted iteration time, over every plan of the space.

Spaces (both with every device split and every micro-batch size):
* `convex`: all partitions into convex stages whose stage graph is acyclic, with the data edges only;
  and all chains over the depth-first order.
* `graphpipe`: of those partitions the ones that `graphpipe` may choose, aligned with the series-parallel
  structure or contiguous in the depth-first order, and the same chains; of a graph that is not
  series-parallel, aligned with either conversion, or contiguous in the branch-first order too.

Constraints:
1. Partition into convex stages: `convex_partitions`; acyclic: `make_plan`.
2. Alignment, tested on a finished partition by its definition: `_Alignment.holds`.
3. Replicas divide b: `_shapes`.
4. Memory: `Plan.validate`.

Complexity: Bell(n) partitions times the device splits; refused above `max_ops` and `max_devices`.

Departures: none from any paper. Written for plainness and independently of the other planners (sets
of operators instead of masks), so that it can tell on them. Candidates are skipped only when all
micro-batches of their slowest stage alone take longer than the best plan found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

import networkx as nx

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.series_parallel import Barrier, branch_barrier, series_parallel_order, shortest_barrier
from gpp.plan import Plan, make_plan
from gpp.planners.base import AbstractPlanner, Predict, check_at_least
from gpp.planners.chains import branch_first_order, depth_first_order

Ops = frozenset[int]
Shape = tuple[float, int, bool, tuple[Ops, ...], tuple[int, ...]]
"""(time of the slowest stage, micro-batch size, chain, stages, replicas)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive(AbstractPlanner):
    """Every plan of a space.

    Args:
        space: `convex` or `graphpipe`; see the module's docstring.
        replication: whether a stage may be replicated.
        max_ops, max_devices: larger problems are refused.
    """

    space: Literal["convex", "graphpipe"] = "convex"
    replication: bool = True
    max_ops: int = 9
    max_devices: int = 6

    def __post_init__(self) -> None:
        if self.space not in ("convex", "graphpipe"):
            raise InvalidConfig("strategy.planner.space", self.space, "must be convex or graphpipe", "use convex")
        check_at_least("max_ops", self.max_ops, 1)
        check_at_least("max_devices", self.max_devices, 1)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        for field, have, most in (
            ("graph.max_ops", problem.graph.num_ops, self.max_ops),
            ("cluster.num_devices", problem.cluster.num_devices, self.max_devices),
        ):
            if have > most:
                raise InvalidConfig(field, have, f"the exhaustive planner takes at most {most}", "use strategy/planner=graphpipe")
        best, best_s, shortage = None, float("inf"), None
        shapes = sorted(self._shapes(problem), key=lambda shape: shape[0])
        for slowest_s, b, chain, stages, counts in shapes:
            if slowest_s >= best_s:
                break
            parts = [(mask_of(stage), count) for stage, count in zip(stages, counts, strict=True)]
            try:
                plan = make_plan(problem, "exhaustive", parts, b, chain=chain, ordered=chain)
                plan.validate(problem)
            except InvalidPlan:
                continue
            except Infeasible as error:
                shortage = error
                continue
            seconds = predict(plan).metrics.iteration_s
            if seconds < best_s:
                best, best_s = plan, seconds
        if best is None:
            raise shortage or Infeasible("no plan exists", "more devices or memory")
        return replace(best, explanation=(f"best of {len(shapes)} plans of the space {self.space}",))

    def _shapes(self, problem: Problem) -> Iterator[Shape]:
        """Every plan of the space with the time that its slowest stage needs for a mini-batch."""
        linear = list(_intervals(depth_first_order(problem.graph)))
        known = {frozenset(stages) for stages in linear}
        most = problem.cluster.num_devices if self.replication else 1
        alignments = [_Alignment(problem, most, barrier) for barrier in (shortest_barrier, branch_barrier)]
        if alignments[0].converted:
            known |= {frozenset(stages) for stages in _intervals(branch_first_order(problem.graph))}
        spaces = [
            (stages, False)
            for stages in convex_partitions(problem.graph)
            if self.space == "convex" or frozenset(stages) in known or any(a.holds(frozenset(stages), a.every) for a in alignments)
        ]
        for stages, chain in [*spaces, *((stages, True) for stages in linear)]:
            for counts in itertools.product(range(1, problem.cluster.num_devices + 1), repeat=len(stages)):
                if sum(counts) > problem.cluster.num_devices or (not self.replication and max(counts) > 1):
                    continue
                for b in problem.microbatch_sizes():
                    if all(b % r == 0 for r in counts):
                        yield _slowest_s(problem, stages, counts, b), b, chain, stages, counts


def _slowest_s(problem: Problem, stages: tuple[Ops, ...], counts: tuple[int, ...], b: int) -> float:
    """Seconds that the slowest stage computes for a mini-batch, on the fastest devices."""
    fastest = max(range(problem.cluster.num_devices), key=lambda d: problem.cluster.devices[d].speed_factor)
    times = []
    for stage, count in zip(stages, counts, strict=True):
        op_times = problem.op_times(b // count, fastest)
        times.append(sum(op_times.forward_s[op] + op_times.backward_s[op] for op in stage))
    return problem.minibatch_size // b * max(times) * (1 - 1e-9)


def convex_partitions(graph: OpGraph) -> Iterator[tuple[Ops, ...]]:
    """All partitions of the operators into convex sets; their quotient may still have a cycle."""

    def place(op: int, blocks: list[Ops]) -> Iterator[tuple[Ops, ...]]:
        if op == graph.num_ops:
            yield tuple(blocks)
            return
        for i, block in enumerate(blocks):
            larger = block | {op}
            if graph.is_convex(mask_of(larger)):
                yield from place(op + 1, [*blocks[:i], larger, *blocks[i + 1 :]])
        yield from place(op + 1, [*blocks, frozenset({op})])

    yield from place(0, [])


def _intervals(order: tuple[int, ...]) -> Iterator[tuple[Ops, ...]]:
    for size in range(len(order)):
        for cuts in itertools.combinations(range(1, len(order)), size):
            yield tuple(frozenset(order[i:j]) for i, j in itertools.pairwise((0, *cuts, len(order))))


class _Alignment:
    """Whether a partition can be had by the planner's splits alone."""

    def __init__(self, problem: Problem, most_replicas: int, barrier: Barrier) -> None:
        graph, sizes = problem.graph, problem.microbatch_sizes()
        smallest = min(b // r for b in sizes for r in range(1, min(most_replicas, b) + 1) if b % r == 0)
        times = problem.op_times(smallest, 0)
        _, added, _ = series_parallel_order(graph, (times.forward_s + times.backward_s).tolist(), barrier)
        self.converted = bool(added)
        edges = nx.DiGraph([(a, b) for a in range(graph.num_ops) for b in bits(graph.successors[a])])
        edges.add_nodes_from(range(graph.num_ops))
        edges.add_edges_from(added)
        self.before = nx.transitive_closure_dag(edges)
        self.every: Ops = frozenset(range(graph.num_ops))
        self.rank = {op: i for i, op in enumerate(nx.lexicographical_topological_sort(edges))}
        self._splits: dict[Ops, list[tuple[Ops, Ops]]] = {}

    def holds(self, stages: frozenset[Ops], ops: Ops) -> bool:
        if len(stages) == 1:
            return True
        if ops not in self._splits:
            self._splits[ops] = list(self._all_splits(ops))
        for first, second in self._splits[ops]:
            left, right = (frozenset(s for s in stages if s <= half) for half in (first, second))
            if len(left) + len(right) == len(stages) and self.holds(left, first) and self.holds(right, second):
                return True
        return False

    def _all_splits(self, ops: Ops) -> Iterator[tuple[Ops, Ops]]:
        branches = self._branches(ops)
        yield from ((ops - chosen, chosen) for chosen in _unions(branches) if chosen != ops)
        items = self._items(ops)
        for p, item in enumerate(items):
            before, after = frozenset().union(*items[:p]), frozenset().union(*items[p + 1 :])
            inner = self._branches(item)
            if after:
                yield before | item, after
                for branch in inner if len(inner) > 1 else ():
                    pieces = self._items(branch)
                    for q in range(len(pieces)):
                        tail = frozenset().union(*pieces[q:])
                        yield before | (item - tail), tail | after
                yield from ((before | (item - chosen), chosen | after) for chosen in _unions(inner) if chosen != item)
            if before:
                for branch in inner if len(inner) > 1 else ():
                    pieces = self._items(branch)
                    for q in range(1, len(pieces) + 1):
                        head = frozenset().union(*pieces[:q])
                        yield before | head, (item - head) | after
                yield from ((before | chosen, (item - chosen) | after) for chosen in _unions(inner) if chosen != item)

    def _branches(self, ops: Ops) -> list[Ops]:
        return [frozenset(part) for part in nx.weakly_connected_components(self.before.subgraph(ops))]

    def _items(self, ops: Ops) -> list[Ops]:
        ranked = sorted(ops, key=self.rank.__getitem__)
        cuts = [k for k in range(1, len(ranked)) if all(self.before.has_edge(a, b) for a in ranked[:k] for b in ranked[k:])]
        return [frozenset(ranked[i:j]) for i, j in itertools.pairwise([0, *cuts, len(ranked)])]


def _unions(branches: list[Ops]) -> Iterator[Ops]:
    """Unions of the proper, non-empty subsets of several branches."""
    for size in range(1, len(branches)):
        for chosen in itertools.combinations(branches, size):
            yield frozenset().union(*chosen)
