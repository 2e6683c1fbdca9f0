"""Groups of operators as operators: their sums, their variants, and the tensors that are left between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpp.graph.op_graph import Op, OpGraph, ReplicaSums, Variant
from gpp.graph.transients import grouped

_AMOUNTS = (
    "forward_flops",
    "backward_flops",
    "traffic_bytes",
    "num_kernels",
    "saved_bytes",
    "weight_flops",
    "late_bytes",
    "answer_bytes",
)


def nodes_of(op: Op) -> tuple[str, ...]:
    """The captured nodes that an operator was made of; a hand-written operator without any stands for itself."""
    return op.nodes or (op.name,)


def in_groups(graph: OpGraph, group: Sequence[int] | Mapping[int, int], ops: Sequence[Op]) -> OpGraph:
    """The graph of groups: their variants, and the tensors that cross between them, ordered by the groups that make them.

    Args:
        graph: the operators that were grouped.
        group: operator -> its group.
        ops: the groups.
    """
    tensors = []
    for tensor in graph.tensors:
        producer = group[tensor.producer]
        if consumers := sorted({group[c] for c in tensor.consumers} - {producer}):
            tensors.append(replace(tensor, producer=producer, consumers=tuple(consumers)))
    tensors.sort(key=lambda tensor: tensor.producer)
    return replace(graph, ops=_with_variants(graph, group, ops), tensors=tuple(tensors))


def merged(name: str, kind: str, graph: OpGraph, part: Sequence[int]) -> Op:
    """One operator with the work of some of a graph's, in this order; a single one stays as it is, but for its name.

    It has no variants: they name neighbours by numbers that no longer hold, and `in_groups` makes those of a group.
    """
    if len(part) == 1:
        return replace(graph.ops[part[0]], name=name, variants=())
    return summed(name, kind, graph, part)


def summed(name: str, kind: str, graph: OpGraph, part: Sequence[int]) -> Op:
    """One operator with the amounts, the parameters and the nodes of some operators of a graph, in this order."""
    ops = [graph.ops[i] for i in part]
    amounts = {field: sum(getattr(op, field) for op in ops) for field in _AMOUNTS}
    transient = grouped(graph, part)
    return Op(
        name=name,
        kind=kind,
        params=tuple(dict.fromkeys(p for op in ops for p in op.params)),
        inputs=tuple(dict.fromkeys(name for op in ops for name in op.inputs)),
        nodes=tuple(node for op in ops for node in nodes_of(op)),
        variants=(),
        transient_bytes=transient.slope,
        fixed_bytes=float(transient.fixed),
        **amounts,
    )


def _with_variants(fine: OpGraph, group: Sequence[int] | Mapping[int, int], ops: Sequence[Op]) -> tuple[Op, ...]:
    """Groups with the degrees that all of their members declare by shares; the arguments are those of `in_groups`.

    Times that a profile declares are times of its own operators, and of no group.
    """
    if not any(variant.share is not None for op in fine.ops for variant in op.variants):
        return tuple(ops)
    members: list[list[int]] = [[] for _ in ops]
    for op in range(fine.num_ops):
        members[group[op]].append(op)
    degrees = sorted({v.degree for op in fine.ops for v in op.variants if v.share is not None})
    out = []
    for number, op in enumerate(ops):
        ways = [_grouped(fine, group, number, members[number], degree) for degree in degrees]
        out.append(replace(op, variants=tuple(way for way in ways if way is not None)))
    return tuple(out)


def _grouped(
    fine: OpGraph, group: Sequence[int] | Mapping[int, int], number: int, members: Sequence[int], degree: int
) -> Variant | None:
    """The variant of one group at a degree; None if a member declares none."""
    found: list[tuple[Op, Variant, float]] = []
    for i in members:
        own = next((v for v in fine.ops[i].variants if v.degree == degree and not v.recompute), None)
        if own is None or own.share is None:
            return None
        found.append((fine.ops[i], own, own.share))
    work = [op.forward_flops + op.backward_flops for op, _, _ in found]
    if not sum(work):
        work = [op.traffic_bytes for op, _, _ in found]
    share = sum(w * part for w, (_, _, part) in zip(work, found, strict=True)) / sum(work) if sum(work) else 1.0
    held: dict[str, float] = {}
    for op, way, _ in found:
        held |= {name: fine.param_of[name].num_bytes * way.params for name in op.params if name not in held}
    whole = sum(fine.param_of[name].num_bytes for name in held)

    def peers(side: str) -> tuple[tuple[int, float], ...]:
        sizes: dict[int, float] = {}
        for _, way, _ in found:
            for peer, size in getattr(way, side):
                if group[peer] != number:
                    sizes[group[peer]] = sizes.get(group[peer], 0.0) + size
        return tuple(sorted(sizes.items()))

    def sums(side: str) -> ReplicaSums:
        each = [getattr(way, side) for _, way, _ in found]
        return ReplicaSums(count=sum(one.count for one in each), num_bytes=sum(one.num_bytes for one in each))

    return Variant(
        degree=degree,
        share=share,
        params=sum(held.values()) / whole if whole else 1.0,
        saved_bytes=sum(way.saved_bytes for _, way, _ in found),
        receive=peers("receive"),
        send=peers("send"),
        forward_sums=sums("forward_sums"),
        backward_sums=sums("backward_sums"),
    )


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
    ops = [merged(op.name, op.kind, graph, part) for op, part in zip(groups.ops, parts, strict=True)]
    return in_groups(graph, group, ops)
