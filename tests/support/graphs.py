"""Tiny named graphs and problems for tests."""

from __future__ import annotations

from dataclasses import replace

from gpp.cluster import Cluster, Device, Link, uniform
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor

DEVICE = Device(kind="cpu", memory_bytes=1e15, peak_flop_per_s={"float32": 1}, memory_bandwidth_bytes_per_s=1)


def graph(num_ops: int, edges: list[tuple[int, int]], forward: float = 1.0, backward: float = 2.0, saved: float = 1.0) -> OpGraph:
    """Operators that take `forward` and `backward` seconds a sample under `Constant`; one tensor for each producer."""
    consumers: dict[int, list[int]] = {}
    for a, b in sorted(edges):
        consumers.setdefault(a, []).append(b)
    return OpGraph(
        name="test",
        ops=tuple(Op(name=f"op{i}", forward_flops=forward, backward_flops=backward, saved_bytes=saved) for i in range(num_ops)),
        tensors=tuple(Tensor(name=f"t{a}", producer=a, consumers=tuple(bs), bytes_per_sample=1.0) for a, bs in consumers.items()),
    )


def chain(num_ops: int, **amounts: float) -> OpGraph:
    return graph(num_ops, [(i, i + 1) for i in range(num_ops - 1)], **amounts)


def diamond() -> OpGraph:
    """0 -> {1, 2} -> 3."""
    return graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def two_towers(length: int) -> OpGraph:
    """Two chains of `length` operators without a common source, joined by one operator."""
    edges = [(i, i + 1) for i in range(length - 1)] + [(length + i, length + i + 1) for i in range(length - 1)]
    return graph(2 * length + 1, [*edges, (length - 1, 2 * length), (2 * length - 1, 2 * length)])


def with_weights(of: OpGraph, num_bytes: int | None = None) -> OpGraph:
    """A parameter for every operator, so that replicas meet before each update; of other sizes each, unless one is given."""
    ops = tuple(replace(op, params=(f"w{i}",)) for i, op in enumerate(of.ops))
    sizes = range(8, 8 + of.num_ops) if num_bytes is None else [num_bytes] * of.num_ops
    return replace(of, ops=ops, params=tuple(Param(name=f"w{i}", num_bytes=size) for i, size in enumerate(sizes)))


def in_halves(of: OpGraph) -> OpGraph:
    """Operators that read trained weights leave two fifths of their backward for later, and hold bytes until then."""
    ops = tuple(
        replace(op, weight_flops=0.4 * op.backward_flops, late_bytes=0.7 * op.saved_bytes) if of.trained_by[i] else op
        for i, op in enumerate(of.ops)
    )
    return replace(of, ops=ops)


def cluster(num_devices: int, memory_bytes: float = 1e15) -> Cluster:
    """Equal devices on links that cost nothing."""
    return uniform(
        name="test",
        num_nodes=1,
        devices_per_node=num_devices,
        device=DEVICE,
        memory_bytes=memory_bytes,
        intra_node=Link(latency_s=0.0, bandwidth_bytes_per_s=1e30),
    )


def problem(
    of: OpGraph, num_devices: int, minibatch_size: int, *, memory_bytes: float = 1e15, fixed_s: float = 0.0, **more
) -> Problem:
    return Problem(
        graph=of, cluster=cluster(num_devices, memory_bytes), cost=Constant(fixed_s=fixed_s), minibatch_size=minibatch_size, **more
    )


def within(of: Problem, memory_bytes: float) -> Problem:
    """The problem on devices of so much memory each."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in of.cluster.devices)
    return replace(of, cluster=replace(of.cluster, devices=devices))
