"""A captured graph in the groups of another capture of the same model, at other sizes."""

from __future__ import annotations

from dataclasses import replace

from gpp.graph.coarsen.groups import nodes_of, summed, tensors_between, with_variants
from gpp.graph.op_graph import Op, OpGraph


def grouped_like(graph: OpGraph, groups: OpGraph) -> OpGraph | None:
    """The operators of a capture in the groups of another one; None if the two do not call the same operators.

    Args:
        graph: as captured.
        groups: made of the other capture's operators; its nodes have the same names.
    """
    owner = {node: i for i, op in enumerate(groups.ops) for node in nodes_of(op)}
    if {node for op in graph.ops for node in nodes_of(op)} != set(owner):
        return None
    of_op = [{owner[node] for node in nodes_of(op)} for op in graph.ops]
    if any(len(found) > 1 for found in of_op):
        return None
    group = [found.pop() for found in of_op]
    parts: list[list[int]] = [[] for _ in groups.ops]
    for i, g in enumerate(group):
        parts[g].append(i)
    ops = [_merged(op, graph, part) for op, part in zip(groups.ops, parts, strict=True)]
    return replace(graph, ops=with_variants(graph, group, ops), tensors=tensors_between(graph, group))


def _merged(like: Op, graph: OpGraph, part: list[int]) -> Op:
    if len(part) == 1:
        return replace(graph.ops[part[0]], name=like.name, variants=())
    return summed(like.name, like.kind, graph, part)
