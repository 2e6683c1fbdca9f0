"""Random operator graphs for tests and benchmarks: the same seed gives the same graph everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

from gpp.errors import InvalidConfig
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor


def random_series_parallel(num_ops: int, seed: int, *, skew: float = 1.0) -> OpGraph:
    """A random series-parallel graph of `num_ops` operators, with a skip edge beside its paths for every tenth of them.

    Args:
        skew: spread of the amounts: each is `10 ** uniform(-skew/2, skew/2)` times its scale; 0 makes all equal.
    """
    rng = _rng(num_ops, seed, skew)
    edges: set[tuple[int, int]] = set()

    def grow(first: int, count: int, parallel: bool) -> tuple[list[int], list[int]]:
        """Lay out operators first..first+count-1; returns their sources and sinks."""
        if count == 1:
            return [first], [first]
        pieces = _split(rng, count, rng.randint(2, min(4, count)))
        sources: list[int] = []
        sinks: list[int] = []
        for i, size in enumerate(pieces):
            ins, outs = grow(first, size, not parallel if rng.random() < 0.8 else parallel)
            if not parallel and i:
                edges.update((a, b) for a in sinks for b in ins)
                sinks = outs
            else:
                sources, sinks = sources + ins, sinks + outs
            first += size
        return sources, sinks

    grow(0, num_ops, parallel=False)
    below = _reachable(num_ops, edges)
    skips = [(a, b) for a in range(num_ops) for b in sorted(below[a]) if (a, b) not in edges]
    edges.update(rng.sample(skips, min(len(skips), round(0.1 * num_ops))))
    return _with_amounts(f"series_parallel_{num_ops}_{seed}", num_ops, edges, rng, skew)


def random_dag(num_ops: int, seed: int, *, skew: float = 1.0) -> OpGraph:
    """A random weakly connected graph of `num_ops` operators and half as many edges again, mostly not series-parallel.

    Args:
        skew: as in `random_series_parallel`.
    """
    rng = _rng(num_ops, seed, skew)
    edges: set[tuple[int, int]] = set()
    for op in range(1, num_ops):
        # Near predecessors keep the graph deep enough to be worth a pipeline.
        edges.add((rng.randint(max(0, op - 6), op - 1), op))
    for _ in range(round(0.5 * num_ops) if num_ops > 1 else 0):
        a, b = sorted(rng.sample(range(num_ops), 2))
        edges.add((a, b))
    return _with_amounts(f"dag_{num_ops}_{seed}", num_ops, edges, rng, skew)


def equal_towers(num_ops: int, num_branches: int = 4) -> OpGraph:
    """Branches of equal operators, joined by one: the shape of a multi-modal Transformer, of any length.

    Operators that do not divide evenly go to the first branches.

    >>> [(t.producer, t.consumers) for t in equal_towers(5, num_branches=2).tensors]
    [(0, (1,)), (1, (4,)), (2, (3,)), (3, (4,))]
    """
    rng = _rng(num_ops, 0, 0.0)
    if not 1 <= num_branches < num_ops:
        raise InvalidConfig("num_branches", num_branches, f"must be in 1 .. {num_ops - 1}", "set num_branches=4")
    edges: set[tuple[int, int]] = set()
    first = 0
    for branch in range(num_branches):
        last = first + len(range(branch, num_ops - 1, num_branches)) - 1
        edges.update((op, op + 1) for op in range(first, last))
        edges.add((last, num_ops - 1))
        first = last + 1
    return _with_amounts(f"towers_{num_ops}", num_ops, edges, rng, 0.0)


def equal_chain(num_ops: int) -> OpGraph:
    """Equal operators in a row, each of which trains weights and makes gradients of its input: a third of the work each.

    >>> [(op.name, op.forward_flops, op.backward_flops) for op in equal_chain(2).ops]
    [('op0', 1000000000.0, 2000000000.0), ('op1', 1000000000.0, 2000000000.0)]
    """
    rng = _rng(num_ops, 0, 0.0)
    graph = _with_amounts(f"chain_{num_ops}", num_ops, {(op, op + 1) for op in range(num_ops - 1)}, rng, 0.0)
    params = tuple(replace(param, trainable=True) for param in graph.params)
    # A third of the traffic is the input, the output or a gradient of one; weights' gradients are made of two of them.
    ops = tuple(replace(op, weight_flops=op.forward_flops, late_bytes=2 * op.traffic_bytes / 3) for op in graph.ops)
    return replace(graph, ops=ops, params=params)


def _rng(num_ops: int, seed: int, skew: float) -> random.Random:
    if num_ops < 1:
        raise InvalidConfig("num_ops", num_ops, "must be at least 1", "set num_ops=8")
    if not skew >= 0:
        raise InvalidConfig("skew", skew, "must be at least 0", "set skew=1")
    return random.Random(seed)


def _split(rng: random.Random, total: int, parts: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _reachable(num_ops: int, edges: set[tuple[int, int]]) -> list[set[int]]:
    out: list[set[int]] = [set() for _ in range(num_ops)]
    for a, b in sorted(edges, reverse=True):
        out[a] |= out[b] | {b}
    return out


def _with_amounts(name: str, num_ops: int, edges: set[tuple[int, int]], rng: random.Random, skew: float) -> OpGraph:
    """Operators of about 1 GFLOP and 1 MB a sample, which take a few milliseconds on one CPU core."""

    def amount(scale: float) -> float:
        return float(round(scale * 10 ** rng.uniform(-skew / 2, skew / 2)))

    consumers: list[list[int]] = [[] for _ in range(num_ops)]
    for a, b in sorted(edges):
        consumers[a].append(b)
    ops, tensors, params = [], [], []
    for i in range(num_ops):
        forward, size = amount(1e9), amount(1e5)
        params.append(Param(name=f"op{i}.weight", num_bytes=int(amount(1e6)), trainable=rng.random() < 0.9))
        ops.append(
            Op(
                name=f"op{i}",
                forward_flops=forward,
                backward_flops=2 * forward,
                traffic_bytes=3 * size,
                saved_bytes=size + amount(1e6),
                params=(f"op{i}.weight",),
                nodes=(f"op{i}",),
            )
        )
        if consumers[i]:
            tensors.append(Tensor(name=f"t{i}", producer=i, consumers=tuple(consumers[i]), bytes_per_sample=size))
    return OpGraph(name=name, ops=tuple(ops), tensors=tuple(tensors), params=tuple(params))
