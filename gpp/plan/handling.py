"""What the devices of a plan do with messages: seconds at either end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gpp.cost.edges import decoding, encoding
from gpp.cost.problem import Problem
from gpp.graph.op_graph import Tensor
from gpp.plan.stage import Stage
from gpp.routing import copies, messages


class Edge(NamedTuple):
    """An edge of a plan, as its devices see it.

    Args:
        ends: the stages.
        bytes_per_sample: forwards and backwards.
        bits: of a value; 0: as they are.
        clip: whether values are clipped before they are quantised.
        returns: whether messages go backwards.
    """

    ends: tuple[int, int]
    tensors: tuple[Tensor, ...]
    bytes_per_sample: tuple[float, float]
    bits: int
    clip: bool
    returns: bool


def handling_s(stages: Sequence[Stage], edges: Sequence[Edge], minibatch_size: int, problem: Problem) -> list[tuple[float, float]]:
    """Seconds of a forward and of a backward of each stage (`Plan.handling_s`, which remembers them)."""
    cut = [stage.pieces(minibatch_size) for stage in stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in stages]
    costs = problem.overheads
    took: list[tuple[defaultdict[int, float], defaultdict[int, float]]]
    took = [(defaultdict(float), defaultdict(float)) for _ in stages]
    for edge in edges:
        (s, t), (forward, backward) = edge.ends, edge.bytes_per_sample
        count_out, count_back = len(edge.tensors), sum(tensor.differentiable for tensor in edge.tensors)
        for route in messages(cut[s], cut[t]):
            count = route.hi - route.lo
            makers, readers = group_of[s][route.src_device], group_of[t][route.dst_device]
            for src, dst in copies(makers, readers):
                if src != dst:
                    coded = _codec_s(edge, count, src, dst, problem) if edge.bits else (0.0, 0.0)
                    took[s][0][src] += costs.send_s(forward * count, count_out) + coded[0]
                    took[t][0][dst] += costs.receive_s(forward * count, count_out) + coded[1]
            for src, dst in copies(readers, makers) if edge.returns else ():
                if src != dst:
                    took[t][1][src] += costs.send_s(backward * count, count_back)
                    took[s][1][dst] += costs.receive_s(backward * count, count_back)
    out = []
    for s, pieces in enumerate(cut):
        passes = {replica[0]: 0 for replica in stages[s].replicas}
        for piece in pieces:
            passes[piece.device] += 1
        each = {device: max(passes[replica[0]], 1) for replica in stages[s].replicas for device in replica}
        out.append(tuple(max((total / each[device] for device, total in way.items()), default=0.0) for way in took[s]))
    return out


def _codec_s(edge: Edge, samples: int, src: int, dst: int, problem: Problem) -> tuple[float, float]:
    """Seconds of encoding a message at its sender and of decoding it at its reader."""
    dtype = problem.graph.dtype
    there = encoding(edge.tensors, dtype, samples, edge.bits, clip=edge.clip)
    return problem.codec_s(there, src), problem.codec_s(decoding(edge.tensors, dtype, samples, edge.bits), dst)
