"""What the devices of a plan do with messages: seconds at either end."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from gpp.cost.edges import decoding, encoding
from gpp.routing import copies, messages

if TYPE_CHECKING:
    from gpp.cost.problem import Problem
    from gpp.plan.plan import Plan


def handling_s(plan: Plan, problem: Problem) -> list[tuple[float, float]]:
    """As `Plan.handling_s`, which remembers it."""
    cut = [stage.pieces(plan.minibatch_size) for stage in plan.stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in plan.stages]
    returning, costs = plan.returning(problem.graph), problem.overheads
    took: list[tuple[defaultdict[int, float], defaultdict[int, float]]]
    took = [(defaultdict(float), defaultdict(float)) for _ in plan.stages]
    sizes, dtype = plan.message_bytes(problem.graph), problem.graph.dtype
    for (s, t), tensors in plan.edge_tensors(problem.graph).items():
        (forward, backward), returned, bits = sizes[s, t], [x for x in tensors if x.differentiable], plan.bits_of((s, t))
        for route in messages(cut[s], cut[t]):
            count = route.hi - route.lo
            coding = encoding(tensors, dtype, count, bits, clip=plan.edge_clip), decoding(tensors, dtype, count, bits)
            makers, readers = group_of[s][route.src_device], group_of[t][route.dst_device]
            for src, dst in copies(makers, readers):
                if src != dst:
                    took[s][0][src] += costs.send_s(forward * count, len(tensors)) + problem.codec_s(coding[0], src)
                    took[t][0][dst] += costs.receive_s(forward * count, len(tensors)) + problem.codec_s(coding[1], dst)
            for src, dst in copies(readers, makers) if (s, t) in returning else ():
                if src != dst:
                    took[t][1][src] += costs.send_s(backward * count, len(returned))
                    took[s][1][dst] += costs.receive_s(backward * count, len(returned))
    out = []
    for s, pieces in enumerate(cut):
        passes = {replica[0]: 0 for replica in plan.stages[s].replicas}
        for piece in pieces:
            passes[piece.device] += 1
        each = {device: max(passes[replica[0]], 1) for replica in plan.stages[s].replicas for device in replica}
        out.append(tuple(max((total / each[device] for device, total in way.items()), default=0.0) for way in took[s]))
    return out
