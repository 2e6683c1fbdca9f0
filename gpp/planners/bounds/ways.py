"""Ways through a graph over tensors through which a gradient flows back, for bounds."""

from __future__ import annotations

import numpy as np

from gpp.graph.op_graph import OpGraph


def producers_of(graph: OpGraph) -> list[list[int]]:
    """Producers of each operator over tensors through which a gradient flows back."""
    flows: list[set[int]] = [set() for _ in graph.ops]
    for tensor in graph.tensors:
        if tensor.differentiable:
            for consumer in tensor.consumers:
                flows[consumer].add(tensor.producer)
    return [sorted(found) for found in flows]


def all_before(before: list[list[int]], op: int) -> list[int]:
    """All operators from which a way leads to `op`."""
    found = set[int]()
    open_ops = [op]
    while open_ops:
        new = set(before[open_ops.pop()]) - found
        found |= new
        open_ops += new
    return sorted(found)


def longest_to(before: list[list[int]], weights: np.ndarray, begin: np.ndarray | None = None) -> np.ndarray:
    """The longest way to each operator, itself included; a way may begin anywhere, at the cost of `begin` there."""
    first = [0.0] * len(before) if begin is None else begin.tolist()
    out: list[float] = []
    for weight, least, producers in zip(weights.tolist(), first, before, strict=True):
        for p in producers:
            if out[p] > least:
                least = out[p]
        out.append(weight + least)
    return np.array(out)


def longest_behind(before: list[list[int]], weights: np.ndarray) -> np.ndarray:
    """The longest way behind each operator, itself excluded."""
    out = [0.0] * len(before)
    listed = weights.tolist()
    for op in reversed(range(len(before))):
        through = out[op] + listed[op]
        for p in before[op]:
            out[p] = max(out[p], through)
    return np.array(out)
