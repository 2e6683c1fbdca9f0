"""Groups of operators as operators: their sums, and the tensors that are left between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpp.graph.op_graph import Op, OpGraph, Tensor

_AMOUNTS = ("forward_flops", "backward_flops", "traffic_bytes", "num_kernels", "saved_bytes")


def nodes_of(op: Op) -> tuple[str, ...]:
    """The captured nodes that an operator was made of; a hand-written operator without any stands for itself."""
    return op.nodes or (op.name,)


def tensors_between(graph: OpGraph, group: Sequence[int] | Mapping[int, int]) -> tuple[Tensor, ...]:
    """The tensors that cross between groups, ordered by the groups that make them.

    Args:
        group: operator -> its group.
    """
    out = []
    for tensor in graph.tensors:
        producer = group[tensor.producer]
        if consumers := sorted({group[c] for c in tensor.consumers} - {producer}):
            out.append(replace(tensor, producer=producer, consumers=tuple(consumers)))
    return tuple(sorted(out, key=lambda tensor: tensor.producer))


def summed(name: str, kind: str, ops: list[Op]) -> Op:
    """One operator with the amounts, the parameters and the nodes of `ops`, in this order."""
    amounts = {field: sum(getattr(op, field) for op in ops) for field in _AMOUNTS}
    return Op(
        name=name,
        kind=kind,
        params=tuple(dict.fromkeys(p for op in ops for p in op.params)),
        nodes=tuple(node for op in ops for node in nodes_of(op)),
        variants=(),
        **amounts,
    )
