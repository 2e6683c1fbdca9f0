"""The graph of a model of which nothing is differentiated: what its forwards take in time and memory."""

from __future__ import annotations

from dataclasses import replace

from gpp.graph.op_graph import OpGraph


def forward_only(graph: OpGraph) -> OpGraph:
    """The graph of forwards alone: nothing differentiated or saved, every parameter frozen.

    What an operator takes while it runs is what it would keep for a backward and its temporaries, and what other operators have
    made that is still to be read: in the order of the operators, in which a stage runs them. Bytes at the boundary of a stage are
    counted by its bill, so a graph that says nothing of saved activations (a profile's) takes its messages alone.
    """
    alive = [0.0] * graph.num_ops
    for tensor in graph.tensors:
        size = min(tensor.bytes_per_sample, graph.ops[tensor.producer].saved_bytes)
        for op in range(tensor.producer + 1, max(tensor.consumers, default=tensor.producer) + 1):
            alive[op] += size
    ops = tuple(
        replace(
            op,
            backward_flops=0.0,
            weight_flops=0.0,
            saved_bytes=0.0,
            late_bytes=0.0,
            again_bytes=0.0,
            fixed_bytes=0.0,
            transient_bytes=op.saved_bytes + op.transient_bytes + alive[number],
            variants=(),
        )
        for number, op in enumerate(graph.ops)
    )
    tensors = tuple(replace(tensor, saved=False, differentiable=False) for tensor in graph.tensors)
    return replace(graph, ops=ops, tensors=tensors, params=tuple(replace(param, trainable=False) for param in graph.params))
