"""Coarsening that keeps some operators at the end of the graph apart: those of a loss on whole mini-batches.

a ─ b ─ c ─┬─ l1 ─ l2              a+b ─ c ─┐
d ─ e ─ f ─┘             ──►                ├─ l1+l2
                                   d+e ─ f ─┘
"""

from __future__ import annotations

from dataclasses import replace

from gpp.errors import InvalidGraph
from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.coarsen.groups import in_groups, nodes_of, summed
from gpp.graph.op_graph import Op, OpGraph, Tensor, bits
from gpp.graph.order import fresh_name
from gpp.graph.series_parallel import Order


def coarsen_apart(graph: OpGraph, max_ops: int, apart: int) -> OpGraph:
    """`coarsen`, but merge the operators of a set only with each other: each connected part becomes one operator.

    Args:
        max_ops: the most groups altogether; there is always at least one more group than the set has parts.
        apart: mask of the set; no operator outside of it comes after it.

    Returns:
        A graph whose last operators are the parts of the set, in the order of their first operators.

    Raises:
        InvalidGraph: an operator outside of the set comes after one inside, or there is none outside.
    """
    rest = [i for i in range(graph.num_ops) if not apart >> i & 1]
    if not rest or any(graph.descendants[i] & ~apart for i in bits(apart)):
        raise InvalidGraph("operators that are kept apart must be the last ones, and not all")
    parts = Order.of(graph).components(apart)
    coarse = coarsen(_induced(graph, rest), max(max_ops - len(parts), 1))
    position = {name: g for g, op in enumerate(coarse.ops) for name in nodes_of(op)}
    group = {i: position[nodes_of(graph.ops[i])[0]] for i in rest}
    group |= {i: len(coarse.ops) + p for p, part in enumerate(parts) for i in bits(part)}
    names = {op.name for op in coarse.ops}
    ops = [*coarse.ops, *(_merged(graph, list(bits(part)), names) for part in parts)]
    return in_groups(graph, group, ops)


def _induced(graph: OpGraph, ops: list[int]) -> OpGraph:
    """The graph of some operators and the tensors among them; variants, which may name others, are left out."""
    position = {op: i for i, op in enumerate(ops)}
    tensors: list[Tensor] = []
    for tensor in graph.tensors:
        if tensor.producer in position and (consumers := tuple(position[c] for c in tensor.consumers if c in position)):
            tensors.append(replace(tensor, producer=position[tensor.producer], consumers=consumers))
    return replace(graph, ops=tuple(replace(graph.ops[op], variants=()) for op in ops), tensors=tuple(tensors))


def _merged(graph: OpGraph, part: list[int], taken: set[str]) -> Op:
    """One operator with the work of some of a graph's, in this order; it is named after the last, which makes the result."""
    last = graph.ops[part[-1]]
    return summed(fresh_name(last.name, taken, "#"), last.kind, graph, part)
