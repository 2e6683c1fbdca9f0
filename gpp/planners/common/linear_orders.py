"""Linear orders of a graph, and the tables of all their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpp.cost.amounts import Params, StageBytes
from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.transients import Transients
from gpp.planners.common.stage_costs import StageCosts


def depth_first_order(graph: OpGraph) -> tuple[int, ...]:
    """A topological order in which a branch is finished before the next one is begun.

    Of the operators that became ready last, the smallest goes first.

    >>> depth_first_order(equal_towers(5, num_branches=2))
    (0, 1, 2, 3, 4)
    """
    missing = [mask.bit_count() for mask in graph.predecessors]
    stack = [op for op in reversed(range(graph.num_ops)) if not missing[op]]
    out = []
    while stack:
        op = stack.pop()
        out.append(op)
        ready = []
        for nxt in bits(graph.successors[op]):
            missing[nxt] -= 1
            if not missing[nxt]:
                ready.append(nxt)
        stack.extend(reversed(ready))
    return tuple(out)


def branch_first_order(graph: OpGraph) -> tuple[int, ...]:
    """A topological order by the inputs that operators depend on: what needs one input alone comes before what joins two.

    In a model whose towers exchange values at several depths, each tower's own part then lies in one piece.
    """
    sources = [0] * graph.num_ops
    position = {op: i for i, op in enumerate(depth_first_order(graph))}
    for op in range(graph.num_ops):
        before = graph.predecessors[op]
        sources[op] = 1 << op if not before else 0
        for prev in bits(before):
            sources[op] |= sources[prev]
    # An operator's inputs contain its predecessors', so ascending numbers of inputs are a topological order.
    return tuple(sorted(range(graph.num_ops), key=lambda op: (sources[op].bit_count(), sources[op], position[op])))


class Intervals:
    """Amounts of every interval [i, j) of a linear order: arrays of shape [n + 1, n + 1].

    Args:
        amounts: what the bytes of each interval as a stage are made of, as in `Problem.amounts`.
        moved: bytes per sample at its boundary in the direction in which there are more: gradients, which go as the data do
            into which they are; of a graph of forwards alone its data.
        entering: bytes per sample that come in, and go back for them, in both passes.
        link_out_bytes: bytes per sample that cross the end of the interval out of its last operator, both passes.
    """

    def __init__(self, costs: StageCosts, order: tuple[int, ...]) -> None:
        graph, problem = costs.graph, costs.problem
        self.order, n = order, len(order)
        at = {op: i for i, op in enumerate(order)}
        frozen, trainable, narrow, largest, rows, kept, coming, going, entering = (np.zeros((n + 2, n + 2)) for _ in range(9))
        for name, readers in graph.readers.items():
            places = sorted(at[op] for op in bits(readers))
            *sizes, size = Params.of([graph.param_of[name]])
            for table, own in zip((trainable, frozen, narrow), sizes, strict=True):
                if own:
                    _add_first(table, places, 0, own)
            largest[places, np.add(places, 1)] = np.maximum(largest[places, np.add(places, 1)], size)
        for size, readers in graph.rows:
            _add_first(rows, sorted(at[op] for op in bits(readers)), 0, size)
        for i, op in enumerate(order):
            _add(kept, 0, i, i + 1, n, graph.ops[op].saved_bytes)
        self.link_out_bytes = np.zeros(n + 1)
        for tensor in graph.tensors:
            if not tensor.consumers:
                continue
            size, back = tensor.bytes_per_sample, tensor.bytes_per_sample * tensor.differentiable
            way = back if graph.differentiated else size
            i, consumers = at[tensor.producer], sorted(at[c] for c in tensor.consumers)
            # Made inside and read outside: i in the interval, which ends before the last consumer.
            _add(going, 0, i, i + 1, consumers[-1], way)
            if not tensor.saved:
                _add(kept, 0, i, i + 1, consumers[-1], size)
            # Made before the interval and read inside it.
            _add_first(kept, consumers, i + 1, size)
            _add_first(coming, consumers, i + 1, way)
            sent = problem.sent_bytes(tensor) + back
            _add_first(entering, consumers, i + 1, sent)
            self.link_out_bytes[i + 1] += sent
        frozen, trainable, narrow, rows, kept, coming, going, self.entering = (
            table.cumsum(0).cumsum(1)[: n + 1, : n + 1]
            for table in (frozen, trainable, narrow, rows, kept, coming, going, entering)
        )
        self.trainable = trainable
        self.moved = coming + going
        if not graph.differentiated:
            self.moved, coming, going = np.maximum(coming, going), 0.0 * coming, 0.0 * going
        transient = Transients(graph).of_intervals(order).within(coming, going)
        # The largest of an interval is that of one that begins later, or ends sooner.
        largest = np.maximum.accumulate(np.maximum.accumulate(largest[n::-1, : n + 1], 0), 1)[::-1]
        params = Params(trainable, frozen, narrow, largest)
        self.amounts = problem.amounts_of(params, kept, transient.slope, transient.fixed, rows=rows, waiting=going)
        self._copies = problem.regime.assumed_copies
        self.prefix_s = np.concatenate(
            [np.zeros((len(costs.forward_s), 1)), np.cumsum((costs.forward_s + costs.backward_s)[:, list(order)], axis=1)], axis=1
        )

    def held(self, index: Any, samples: Any) -> StageBytes:
        """Bytes of some intervals as stages, with so many samples of a micro-batch on a device.

        Args:
            index: of the arrays, such as (i, j).
        """
        return self.amounts.take(index).held(samples, self._copies)

    def mask(self, i: int, j: int) -> int:
        """The operators of an interval."""
        return sum(1 << op for op in self.order[i:j])


def intervals(costs: StageCosts, order: tuple[int, ...]) -> Intervals:
    """The tables of an order, made once."""
    found = costs.of_orders.get(order)
    if not isinstance(found, Intervals):
        found = costs.of_orders[order] = Intervals(costs, order)
    return found


def _add(table: np.ndarray, i_low: int, i_high: int, j_low: int, j_high: int, amount: float) -> None:
    """Add to all intervals [i, j) with i_low <= i <= i_high and j_low <= j <= j_high (as differences, summed up later)."""
    if i_low <= i_high and j_low <= j_high:
        table[i_low, j_low] += amount
        table[i_low, j_high + 1] -= amount
        table[i_high + 1, j_low] -= amount
        table[i_high + 1, j_high + 1] += amount


def _add_first(table: np.ndarray, places: list[int], after: int, amount: float) -> None:
    """Add once to every interval that starts at `after` or later and holds one of the places."""
    low, n = after, table.shape[0] - 2
    for place in places:
        _add(table, low, place, place + 1, n, amount)
        low = place + 1
