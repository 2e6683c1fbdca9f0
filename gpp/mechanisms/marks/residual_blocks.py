"""The blocks of a model as vPipe has them: each ends at a sum with what went past its operators."""

from __future__ import annotations

from itertools import pairwise

from gpp.graph.op_graph import OpGraph, bits


def residual_blocks(graph: OpGraph, order: tuple[int, ...]) -> list[tuple[int, int]]:
    """The blocks of an order, as intervals of positions; what is behind the last sum is a block of its own.

    An operator, or a group of them, is a sum if it reads two others of which one depends on the other, since then one of them was
    carried past.
    """
    ends = {0, len(order)}
    for position, op in enumerate(order):
        reads = mask = graph.predecessors[op]
        for other in bits(reads):
            if graph.descendants[other] & mask:
                ends.add(position + 1)
                break
    return list(pairwise(sorted(ends)))
