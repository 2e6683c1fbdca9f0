"""The oracle of the tests: everything in a space, scored by prediction.

Objective: the predicted iteration time, over every plan of the space.

Spaces (all with every device split; devices are dealt out as contiguous ranges in stage order, which on a cluster of one node
and equal devices loses nothing):
* `convex`: all partitions into convex stages whose stage graph is acyclic, with the data edges only;
  and all chains over the depth-first order.
* `graphpipe`: of those partitions the ones that are aligned with the series-parallel structure or contiguous in the
  depth-first order, and the same chains; of a graph that is not series-parallel, aligned with either conversion, or
  contiguous in the branch-first order too.
Micro-batches: one size for all stages; with `per_stage_microbatch` any size at any stage, and of kFkB both k = 1
everywhere and the k with which all stages turn over as many samples at a time.

Constraints:
1. Partition into convex stages: `convex_partitions`; acyclic: `Shape.of`.
2. Alignment, tested on a finished partition by its definition: `_Alignment.holds`.
3. Replicas divide b: `OptionTables.of`.
4. Memory: `Plan.validate`; what certainly does not fit is left out before (`OptionTables.bounds_s`).

Complexity: Bell(n) partitions times the device splits; refused above 9 operators and 6 devices.

Departures: none from any paper. Written independently of the other planners, so that it can tell on them. Candidates are
skipped only when they provably take longer than the best plan found (`OptionTables.bounds_s`), and of partitions that differ
by exchanging operators that are alike in all but name one is kept, where all devices are alike too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, final

import networkx as nx
import numpy as np

from gpp.cost.problem import Problem
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan, MalformedProgram
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.graph.series_parallel import Barrier, branch_barrier, series_parallel_order, shortest_barrier
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.base import AbstractPlanner, Predict
from gpp.planners.common.linear_orders import branch_first_order, depth_first_order
from gpp.settings import settings
from tests.oracle.exhaustive_bounds import Masks, OptionTables, Shape, sizes

Ops = frozenset[int]


@final
@settings("strategy.planner")
class Exhaustive(AbstractPlanner):
    """Every plan of a space.

    Args:
        space: `convex` or `graphpipe`; see the module's docstring.
        per_stage_microbatch: whether stages may have micro-batches of different sizes; for tiny graphs.
    """

    space: Literal["convex", "graphpipe"] = "convex"
    per_stage_microbatch: bool = False

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        for field, have, most in (
            ("graph.max_ops", problem.graph.num_ops, 9),
            ("cluster.num_devices", problem.cluster.num_devices, 6),
        ):
            if have > most:
                raise InvalidConfig(field, have, f"the exhaustive planner takes at most {most}", "use strategy/planner=graphpipe")
        tables = OptionTables.of(problem, problem.max_replicas or problem.cluster.num_devices, self.per_stage_microbatch)
        shapes = [shape for masks, chain in self._partitions(problem) if (shape := Shape.of(problem.graph, masks, chain))]
        combos = {k: tables.combinations(k, problem.cluster.num_devices) for k in {len(shape.masks) for shape in shapes}}
        bounds = [tables.bounds_s(shape, combos[len(shape.masks)]) for shape in shapes]
        total = sum(len(bound) for bound in bounds)
        best, best_s, shortage = None, float("inf"), None
        for bound, shape, row in _ascending(bounds):
            if bound >= best_s:
                break
            options = [tables.options[c] for c in combos[len(shapes[shape].masks)][row]]
            for plan in _plans(problem, shapes[shape], options):
                try:
                    plan.validate(problem)
                    seconds = predict(plan).metrics.iteration_s
                except MalformedProgram:
                    continue  # Sizes that do not fit together under the schedule.
                except Infeasible as error:
                    shortage = error
                    continue
                if seconds < best_s:
                    best, best_s = plan, seconds
        if best is None:
            raise shortage or Infeasible("no plan fits the memory of a device", "more memory, or another planner's proposal")
        return replace(best, explanation=(f"best of {total} plans of the space {self.space}",))

    def _partitions(self, problem: Problem) -> Iterator[tuple[Masks, bool]]:
        """Every partition of the space, and whether it is a chain."""
        graph, most = problem.graph, problem.cluster.num_devices
        linear = [masks for masks in _intervals(depth_first_order(graph)) if len(masks) <= most]
        alike = exchangeable(problem)
        if self.space == "convex":
            # A chain of intervals is a convex partition; without its order edges it is among them.
            yield from ((masks, False) for masks in convex_partitions(graph, most, alike))
        else:
            known = {frozenset(masks) for masks in linear}
            alignments = [_Alignment(problem, most, barrier) for barrier in (shortest_barrier, branch_barrier)]
            if alignments[0].converted:
                known |= {frozenset(masks) for masks in _intervals(branch_first_order(graph))}
            for masks in convex_partitions(graph, most):
                stages = frozenset(frozenset(bits(mask)) for mask in masks)
                if frozenset(masks) in known or any(a.holds(stages, a.every) for a in alignments):
                    yield masks, False
        yield from ((masks, True) for masks in linear)


def _ascending(bounds: list[np.ndarray]) -> Iterator[tuple[float, int, int]]:
    """(bound, partition, row) by ascending bound, without those that cannot be."""
    lengths = [len(bound) for bound in bounds]
    every = np.concatenate(bounds) if bounds else np.empty(0)
    starts = np.cumsum([0, *lengths])
    order = np.argsort(every, kind="stable")
    for at in order[: int(np.isfinite(every).sum())].tolist():
        shape = int(np.searchsorted(starts, at, side="right")) - 1
        yield float(every[at]), shape, at - int(starts[shape])


def _plans(problem: Problem, shape: Shape, options: list[tuple[int, int]]) -> Iterator[Plan]:
    """The plan of a shape; if its micro-batches differ also the one whose stages turn over as many samples at a time."""
    parts = [(mask, r) for mask, (_, r) in zip(shape.masks, options, strict=True)]
    every = [b for b, _ in options]
    try:
        plan = make_plan(problem, "exhaustive", parts, every, chain=shape.chain, ordered=True)
    except InvalidPlan:
        return
    yield plan
    if len(set(every)) > 1:
        ks = [max(every) // b if max(every) % b == 0 else 1 for b in every]
        yield make_plan(problem, "exhaustive", parts, every, k=ks, chain=shape.chain, ordered=True)


def convex_partitions(graph: OpGraph, most: int | None = None, alike: tuple[tuple[int, int], ...] = ()) -> Iterator[Masks]:
    """All partitions of the operators into at most `most` convex sets; their quotient may still have a cycle.

    Args:
        alike: pairs of operators, a before b, that may be exchanged: a's set must not come after b's, sets being
            numbered by their first operator. (Otherwise exchange them: the list of numbers becomes smaller, so one that no
            exchange makes smaller is left of all that differ by exchanges.)
    """
    convex = [graph.is_convex(mask) for mask in range(1 << graph.num_ops)]
    before: list[list[int]] = [[a for a, b in alike if b == op] for op in range(graph.num_ops)]
    number = [0] * graph.num_ops

    def place(op: int, blocks: list[int]) -> Iterator[Masks]:
        if op == graph.num_ops:
            yield tuple(blocks)
            return
        first = max((number[a] for a in before[op]), default=0)
        for i in range(first, len(blocks)):
            # Operators are numbered topologically: what lies between op and an earlier one is placed already.
            if convex[blocks[i] | 1 << op]:
                number[op] = i
                yield from place(op + 1, [*blocks[:i], blocks[i] | 1 << op, *blocks[i + 1 :]])
        if most is None or len(blocks) < most:
            number[op] = len(blocks)
            yield from place(op + 1, [*blocks, 1 << op])

    yield from place(0, [])


def exchangeable(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Pairs of operators that differ in their names only, where it does not matter which device they get."""
    graph, cluster = problem.graph, problem.cluster
    if not cluster.homogeneous or len(set(cluster.nodes)) > 1:
        return ()
    shares = sorted({b // r for b in sizes(problem) for r in range(1, cluster.num_devices + 1) if b % r == 0})
    times = [problem.op_times(q, 0) for q in shares]
    seen: dict[object, list[int]] = {}
    for op, spec in enumerate(graph.ops):
        if any(graph.readers[name].bit_count() > 1 for name in spec.params):
            continue
        seconds = tuple((float(t.forward_s[op]), float(t.backward_s[op])) for t in times)
        params = tuple((graph.param_of[name].num_bytes, graph.param_of[name].trainable) for name in spec.params)
        reads = tuple(i for i, tensor in enumerate(graph.tensors) if op in tensor.consumers)
        makes = tuple(
            (t.consumers, t.bytes_per_sample, t.saved, t.differentiable) for t in graph.tensors if t.producer == op and t.consumers
        )
        seen.setdefault((seconds, params, reads, makes, spec.saved_bytes), []).append(op)
    return tuple(pair for ops in seen.values() for pair in itertools.pairwise(ops))


def _intervals(order: tuple[int, ...]) -> Iterator[Masks]:
    for size in range(len(order)):
        for cuts in itertools.combinations(range(1, len(order)), size):
            yield tuple(mask_of(order[i:j]) for i, j in itertools.pairwise((0, *cuts, len(order))))


class _Alignment:
    """Whether a partition can be had by the planner's splits alone."""

    def __init__(self, problem: Problem, most_replicas: int, barrier: Barrier) -> None:
        graph = problem.graph
        smallest = min(b // r for b in sizes(problem) for r in range(1, min(most_replicas, b) + 1) if b % r == 0)
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
