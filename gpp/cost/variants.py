"""Stages whose operators are recomputed in the backward pass or split over several devices, which share one replica.

What an operator's profile declares (`gpp.graph.op_graph.Variant`) is taken as it is. Recomputation needs no declaration: operators
that declare nothing are recomputed together with adjacent ones, and their cost is computed for the whole stage. Planners that add
up amounts of single operators take each operator's cost from `running`: it keeps its inputs, at most as many bytes as before, runs
its forward pass once more, and holds the rest of its activations for one micro-batch, in every stage at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpp.cost.amounts import Params
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import OpGraph, ReplicaSums, Variant, bits, mask_of

if TYPE_CHECKING:
    from gpp.cluster import Cluster
    from gpp.cost.models.base import OpTimes


class Repeats(NamedTuple):
    """The operators of a stage whose work is done again in its backward.

    Args:
        declared: those that run as their profiles declare for it.
        again: those whose forward runs once more.
    """

    declared: Collection[int] = ()
    again: Collection[int] = ()


NOTHING_AGAIN = Repeats()


class Running(NamedTuple):
    """How one operator runs: seconds of both passes, share of its parameters, bytes per sample kept and held for one
    micro-batch."""

    forward_s: float
    backward_s: float
    params: float
    saved_bytes: float
    extra_bytes: float
    variant: Variant | None


def running(graph: OpGraph, op: int, forward_s: float, backward_s: float, recompute: bool, degree: int) -> Running:
    """An operator at a degree, the number of devices that share it, kept or recomputed.

    Args:
        forward_s, backward_s: its own seconds on one device, nothing recomputed, as `Problem.op_times` gives them at this degree.

    Raises:
        InvalidPlan: it declares no such degree.
    """
    own = graph.ops[op]
    variant = next((v for v in own.variants if v.degree == degree and v.recompute == recompute), None)
    if degree == 1 and not recompute:
        return Running(forward_s, backward_s, 1.0, own.saved_bytes, 0.0, variant)
    if variant is not None and variant.share is not None:
        return Running(forward_s, backward_s, variant.params, variant.saved_bytes, variant.extra_bytes, variant)
    if variant is not None:
        total = forward_s + backward_s
        return Running(
            variant.forward * total, variant.backward * total, variant.params, variant.saved_bytes, variant.extra_bytes, variant
        )
    if degree > 1:
        known, again = sorted({v.degree for v in own.variants if v.recompute == recompute} | {1}), " for a second run" * recompute
        raise InvalidPlan(f"operator {own.name} declares degrees {known}{again}, not {degree}")
    saved = recomputed_bytes(graph, op)
    return Running(forward_s, backward_s + forward_s, 1.0, saved, own.saved_bytes - saved, None)


def recomputed_bytes(graph: OpGraph, op: int) -> float:
    """Bytes per sample that an operator is charged in flight where amounts of single operators are added up."""
    inputs = sum(graph.tensors[i].bytes_per_sample for i in graph.tensors_of[op] if graph.tensors[i].producer != op)
    return min(graph.ops[op].saved_bytes, inputs)


def passes(graph: OpGraph, times: OpTimes, ops: Sequence[int], repeats: Repeats, degree: int) -> tuple[float, float, float]:
    """Forward and backward seconds of a stage, and of the latter those of its weights' gradients, without what its boundary
    costs."""
    declared, again = repeats
    forward = backward = weight = 0.0
    for op in ops:
        forward_s, backward_s, weight_s = float(times.forward_s[op]), float(times.backward_s[op]), float(times.weight_s[op])
        way = running(graph, op, forward_s, backward_s, op in declared, degree)
        forward, backward = forward + way.forward_s, backward + way.backward_s + (forward_s if op in again else 0.0)
        if weight_s:
            # What is computed again comes before the gradients of the inputs, so none of it is left for later.
            weight += weight_s * min(way.backward_s / backward_s, 1.0)
    return forward, backward, weight


def sums_s(cluster: Cluster, sums: ReplicaSums, samples: float, devices: tuple[int, ...]) -> float:
    """Seconds of sums over so many samples on a replica's devices: each waits for the links' latencies, and moves its bytes."""
    if not sums.count:
        return 0.0
    return sums.count * cluster.allreduce_s(max(sums.num_bytes * samples / sums.count, 1.0), devices)


class HeldBytes(NamedTuple):
    """Bytes on one device: parameters; per sample what is kept in flight, and what is held for one micro-batch."""

    params: Params
    kept: float
    extra: float


def held(graph: OpGraph, ops: Sequence[int], recompute: Collection[int], degree: int) -> HeldBytes:
    """The bytes that a stage's operators hold on one device, without the stage's boundary."""
    params, kept, extra = Params(0.0, 0.0), 0.0, 0.0
    seen: set[str] = set()
    for op in bits(mask_of(ops)):
        way = running(graph, op, 0.0, 0.0, op in recompute, degree)
        kept, extra = kept + way.saved_bytes, extra + way.extra_bytes
        new = [name for name in graph.ops[op].params if name not in seen]
        seen |= {*new}
        params = params.beside(Params.of(graph.param_of[name] for name in new).times(way.params))
    return HeldBytes(params, kept, extra)
