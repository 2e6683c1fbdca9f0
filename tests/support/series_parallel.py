"""The series-parallel tree of a whole graph."""

from __future__ import annotations

from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import Leaf, Order, Parallel, Series


def decompose(of: OpGraph) -> Leaf | Series | Parallel | None:
    """The series-parallel tree of a graph; None if it is not series-parallel."""
    return Order.of(of).tree(of.all_mask)
