"""PipeDream's optimizer as its authors released it, traps included, so that its users get the plan values that they know.

Source: msr-fiddle/pipedream at 7db6a1c, optimizer/optimizer_graph_hierarchical.py and graph/graph.py (MIT, Microsoft). Repeated
here:

1. States are the antichains that can be reached from the *first* source; with several sources part of the graph is not searched.
2. A state's output counts every operator that an antichain member's ancestors hand something outside of that member's own
   ancestors, though all its readers may lie before the cut; one size for each operator.
3. Replicas synchronise once for each micro-batch of each replica, at 4 (m - 1) w / (m bandwidth), added to the compute time.
4. The first stage's output is not charged to it. Without `activation_compression_ratio` no transfer is charged to anybody.
5. Memory (off unless given) is checked with the micro-batches of the stages *behind*, so the last stage's is zero.
6. All machines are used. Between levels, a stage that is one whole level is synchronised at a share of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import OpGraph, bits, mask_of
from gpp.plan.plan import Objective, Plan
from gpp.planners.base import AbstractReleased, Predict
from gpp.planners.chains.bottleneck import BottleneckChain, Room, Way, best_chain
from gpp.planners.chains.chain_tables import Best, Part, Seconds, fits
from gpp.planners.chains.downsets import Budget, StateFamily
from gpp.planners.chains.hierarchical import even_servers
from gpp.planners.chains.pipedream import PipeDream
from gpp.planners.common.linear_orders import depth_first_order
from gpp.settings import settings


@final
@settings("strategy.planner.released")
class PipeDreamOptimizer(AbstractReleased[PipeDream]):
    """The released optimizer's own plan, at the micro-batch sizes at which it is a plan of this problem."""

    def plan(self, planner: PipeDream, problem: Problem, predict: Predict) -> Plan:
        budget = Budget("pipedream", planner.time_limit_s, planner.memory_limit_bytes)
        best = Best(problem, "pipedream", predict, planner.replication)
        cluster = problem.cluster
        servers = even_servers(cluster) if planner.hierarchical else None
        inner, outer = (link.bandwidth_bytes_per_s for link in cluster.wiring.means)
        one_node = len(set(cluster.nodes)) == 1
        machines = [cluster.num_devices] if servers is None else [len(servers[0]), len(servers)]
        found = published_plan(
            problem.graph,
            machines,
            [inner if one_node else outer] if servers is None else [inner, outer],
            linear=planner.states == "linear",
            compression=planner.activation_compression,
            seconds=np.sum(Seconds(problem).of(1), axis=0),
            budget=budget,
        )
        searched = {op for ops, _ in found.stages for op in ops}
        if len(searched) < problem.graph.num_ops:
            raise Infeasible(
                f"the released optimizer searches from the first source only and reaches {len(searched)} of "
                f"{problem.graph.num_ops} operators; its objective for them is {found.value_s:.6g} s",
                "strategy.planner.compatible=false, or a graph with one source",
            )
        parts = [Part(mask_of(ops), count) for ops, count in found.stages]
        offer_unchanged(problem, best, found.value_s, parts)
        if best.plan is None:
            raise Infeasible(
                f"the released optimizer's plan (own objective {found.value_s:.6g} s) does not fit this memory, "
                "or its replicas no micro-batch",
                "strategy.planner.compatible=false, or devices with more memory",
            )
        objective = Objective(value_s=found.value_s, scope="a sample for the slowest stage")
        line = f"own objective: {objective}, as the released optimizer reckons it"
        return replace(best.plan, objective=objective, explanation=(line,))


def offer_unchanged(problem: Problem, best: Best, value_s: float, parts: list[Part]) -> None:
    """Offer a chain at every micro-batch size that its replicas divide and its memory allows."""
    for b in problem.microbatch_sizes():
        if any(b % part.replicas for part in parts):
            continue
        if fits(problem, parts, b):
            best.offer(value_s, parts, b)


class Published(NamedTuple):
    """A plan of a public tool: its own objective, and (operators, replicas) of each stage in order."""

    value_s: float
    stages: tuple[tuple[tuple[int, ...], int], ...]


class Tool(NamedTuple):
    """What the tool is asked.

    Args:
        seconds: [num_ops] forward plus backward of each operator.
        compression: `activation_compression_ratio`; None leaves transfers out.
        memory_bytes: None for no limit.
    """

    graph: OpGraph
    seconds: np.ndarray
    compression: float | None
    memory_bytes: float | None


def published_plan(
    graph: OpGraph,
    machines: int | Sequence[int],
    bandwidths: float | Sequence[float],
    *,
    linear: bool = False,
    compression: float | None = 1.0,
    memory_bytes: float | None = None,
    seconds: np.ndarray | None = None,
    budget: Budget | None = None,
) -> Published:
    """The plan of PipeDream's optimizer.

    Args:
        machines, bandwidths: of each level, inside servers first (the tool's -n and -b); numbers for one level.
        linear: search the depth-first order's cuts only.
        compression: the tool's -a; None leaves transfers out, as the tool does by default.
        memory_bytes: the tool's -s with --use_memory_constraint; None for no check.
        seconds: [num_ops]; None for a profile, whose graph holds seconds.

    Raises:
        Infeasible: the budget is spent.
    """
    levels = [machines] if isinstance(machines, int) else list(machines)
    speeds = [float(b) for b in ([bandwidths] if isinstance(bandwidths, int | float) else bandwidths)]
    budget = budget or Budget("pipedream", math.inf, math.inf)
    if seconds is None:
        seconds = np.array([op.forward_flops + op.backward_flops for op in graph.ops])
    tool = Tool(graph, seconds, compression, memory_bytes)
    outputs = linear_outputs(graph) if linear else antichain_outputs(graph, budget)
    if len(levels) == 1:
        return _flat(tool, outputs, levels[0], speeds[0], budget)
    return _hierarchical(tool, outputs, levels, speeds, budget)


def sizes(graph: OpGraph) -> list[float]:
    """Output bytes of each operator: one size, whoever reads it."""
    out = [0.0] * graph.num_ops
    for tensor in graph.tensors:
        out[tensor.producer] = max(out[tensor.producer], tensor.bytes_per_sample)
    return out


def linear_outputs(graph: OpGraph) -> dict[int, float]:
    """Prefix -> bytes that its antichain hands on, when artificial edges leave only the prefixes of one order."""
    out, size, mask = {}, sizes(graph), 0
    for op in depth_first_order(graph):
        live = sum(size[p] for p in bits(mask) if graph.successors[p] & ~(mask | 1 << op))
        mask |= 1 << op
        out[mask] = live + size[op]
    return out


def antichain_outputs(graph: OpGraph, budget: Budget) -> dict[int, float]:
    """Prefix -> bytes that its augmented antichain hands on, for all antichains reachable from the first source."""
    ancestors, descendants, successors, size = graph.ancestors, graph.descendants, graph.successors, sizes(graph)
    extra_of: dict[int, int] = {}

    def extra(op: int) -> int:
        if op not in extra_of:
            extra_of[op] = mask_of(p for p in bits(ancestors[op]) if successors[p] & ~ancestors[op] & ~(1 << op))
        return extra_of[op]

    first = next(op for op in range(graph.num_ops) if not graph.predecessors[op])
    seen, queue, out = {1 << first}, [1 << first], {}
    while queue:
        antichain = queue.pop()
        augmented = antichain
        prefix = antichain
        for op in bits(antichain):
            augmented |= extra(op)
            prefix |= ancestors[op]
        out[prefix] = sum(size[op] for op in bits(augmented))
        if not len(out) % 256:
            budget.check()
            budget.hold(len(out) ** 2 / 16, "its states")
        for op in bits(augmented):
            for new in bits(successors[op] & ~antichain):
                if descendants[new] & augmented:
                    continue
                members = augmented & ~(1 << op) | 1 << new
                members = mask_of(x for x in bits(members) if not descendants[x] & members)
                if members not in seen:
                    seen.add(members)
                    queue.append(members)
    return out


class _States:
    """The family behind the tool's states, and their outputs: [num_states] bytes; 0 where none is charged."""

    def __init__(self, tool: Tool, outputs: dict[int, float], budget: Budget) -> None:
        whole = max(outputs, key=int.bit_count)
        self.family = StateFamily(tool.graph, [whole, *(whole & ~prefix for prefix in outputs)], tool.seconds, budget)
        self.outputs = np.array([outputs.get(whole & ~mask, 0.0) for mask in self.family.masks])
        if tool.compression is not None:
            self.outputs = self.outputs / tool.compression
        else:
            self.outputs = np.zeros_like(self.outputs)
        self.outputs[0] = 0.0  # the last state hands nothing on
        self.work = self.family.sums(tool.seconds)
        graph = tool.graph
        params = [sum(graph.param_of[name].num_bytes for name in op.params) for op in graph.ops]
        self.params = self.family.sums(np.array(params, dtype=float))
        self.stashed = self.params + self.family.sums(np.array(sizes(graph)))


def _flat(tool: Tool, outputs: dict[int, float], num_machines: int, bandwidth: float, budget: Budget) -> Published:
    states = _States(tool, outputs, budget)
    family, last = states.family, states.family.num_states - 1

    def ways(room: Room) -> list[Way]:
        found = []
        for m in range(1, num_machines + 1):
            pairs = room.pairs(m)
            start, end = family.start[pairs], family.end[pairs]
            sync = 4 * (m - 1) * (states.params[start] - states.params[end]) / (bandwidth * m)
            time_s = (states.work[start] - states.work[end] + sync) / m
            inner = start != last
            time_s = np.maximum(time_s, np.where(inner, 2.0 * states.outputs[start] / (bandwidth * m), 0.0))
            time_s = np.maximum(time_s, np.where(inner, 2.0 * states.outputs[end] / (bandwidth * m), 0.0))
            rows = time_s[None, :]
            if tool.memory_bytes is not None:
                behind = np.maximum(np.arange(num_machines + 1) - m, 0)
                stash = np.ceil(behind / m)[:, None] * (states.stashed[start] - states.stashed[end])
                rows = np.where(stash > tool.memory_bytes, np.inf, rows)
            keep = np.flatnonzero(rows.min(axis=0) <= room.cap_s)
            found.append(Way(m, m, 0, pairs[keep], rows[:, keep]))
        return found

    chain = best_chain(family, states.work, ways, num_machines, budget, depth_is_devices=True, all_devices=True)
    return _published(family, chain)


def _published(family: StateFamily, chain: BottleneckChain | None) -> Published:
    if chain is None:
        return Published(math.inf, ())
    stages = []
    for cut in chain.cuts:
        mask = family.masks[family.start[cut.pair]] & ~family.masks[family.end[cut.pair]]
        stages.append((tuple(bits(mask)), cut.way.devices))
    return Published(chain.value_s, tuple(stages))


def _hierarchical(tool: Tool, outputs: dict[int, float], levels: list[int], speeds: list[float], budget: Budget) -> Published:
    """Level by level: the times of all stages on one server are the compute times of the next level."""
    states = _States(tool, outputs, budget)
    family, last = states.family, states.family.num_states - 1
    budget.hold(8.0 * family.num_states**2 * sum(levels), "its tables")
    dense = np.full((family.num_states, family.num_states), np.inf)
    dense[family.start, family.end] = states.work[family.start] - states.work[family.end]
    params = np.where(np.isfinite(dense), states.params[:, None] - states.params[None, :], 0.0)
    out = states.outputs
    within, tables = 1, []
    for num_machines, bandwidth in zip(levels, speeds, strict=True):
        whole, tail = [], []
        for m in range(1, num_machines + 1):
            sync = 4 * (m - 1) * params / (bandwidth * m)
            whole.append((dense + sync / within) / m)
            moved = np.maximum(out[:, None], out[None, :]) * 2.0 / (bandwidth * m)
            tail.append(np.maximum((dense + sync) / m, moved))
        best = [whole[0]]
        for m in range(2, num_machines + 1):
            value = whole[m - 1].copy()
            for behind in range(1, m):
                for j in range(1, last):
                    budget.check()
                    np.minimum(value, np.maximum(best[m - behind - 1][:, j, None], tail[behind - 1][None, j, :]), out=value)
            best.append(value)
        tables.append((whole, tail, best))
        dense, within = best[-1], num_machines
    value = float(dense[last, 0])
    return Published(value, tuple(_unroll(family, tables, len(levels) - 1, last, 0)))


def _unroll(
    family: StateFamily, tables: list, level: int, start: int, end: int, times: int = 1
) -> list[tuple[tuple[int, ...], int]]:
    """(operators, replicas over all servers) of the stages between two states."""
    if level < 0:
        return [(tuple(bits(family.masks[start] & ~family.masks[end])), times)]
    whole, tail, best = tables[level]
    m, pieces = len(best), []
    while True:
        value = best[m - 1][start, end]
        if whole[m - 1][start, end] <= value:
            pieces.append((start, end, m))
            break
        behind, j = next(
            (behind, int(j))
            for behind in range(1, m)
            for j in np.flatnonzero(np.maximum(best[m - behind - 1][start], tail[behind - 1][:, end]) <= value)
            if 0 < j < len(family.masks) - 1
        )
        pieces.append((j, end, behind))
        m, end = m - behind, j
    out = []
    for a, b, count in reversed(pieces):
        out += _unroll(family, tables, level - 1, a, b, times * count)
    return out
