"""The seconds that devices spend on messages, at either end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpp.cost.problem import Problem, Remembered
from gpp.cost.stage import messages_of
from gpp.graph.op_graph import Tensor
from gpp.routing import copies, messages
from gpp.stage import Stage


class MessageBytes(NamedTuple):
    """Bytes that go over an edge.

    Args:
        forward, backward: for each sample.
        beside: in each message forwards, beside its samples.
    """

    forward: float
    backward: float
    beside: float


class Edge(NamedTuple):
    """An edge of a plan, as its devices see it.

    Args:
        ends: the stages.
        returns: whether messages go backwards.
    """

    ends: tuple[int, int]
    tensors: Sequence[Tensor]
    sizes: MessageBytes
    returns: bool


class Handled(NamedTuple):
    """One end of a message: seconds of a device, in a stage's pass.

    Args:
        way: 0 forwards, 1 backwards.
        sends: whether this end is the sender's.
    """

    stage: int
    way: int
    device: int
    sends: bool
    seconds: float


def ends(stages: Sequence[Stage], edges: Sequence[Edge], minibatch_size: int, problem: Problem) -> Iterator[Handled]:
    """Both ends of every message of a mini-batch; what codes messages is in them."""
    cut = [stage.pieces(minibatch_size) for stage in stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in stages]
    costs = problem.overheads
    for edge in edges:
        (s, t), (forward, backward, _) = edge.ends, edge.sizes
        coder, value = messages_of(stages[s])
        count_out, count_back = len(edge.tensors), sum(tensor.differentiable for tensor in edge.tensors)
        for route in messages(cut[s], cut[t]):
            count = route.hi - route.lo
            makers, readers = group_of[s][route.src_device], group_of[t][route.dst_device]
            for src, dst in copies(makers, readers):
                if src != dst:
                    coded = coder.coding_s(problem, value, t, edge.tensors, count, (src, dst))
                    yield Handled(s, 0, src, True, costs.send_s(forward * count, count_out) + coded[0])
                    yield Handled(t, 0, dst, False, costs.receive_s(forward * count, count_out) + coded[1])
            for src, dst in copies(readers, makers) if edge.returns else ():
                if src != dst:
                    yield Handled(t, 1, src, True, costs.send_s(backward * count, count_back))
                    yield Handled(s, 1, dst, False, costs.receive_s(backward * count, count_back))


def handling_s(stages: Sequence[Stage], edges: Sequence[Edge], minibatch_size: int, problem: Problem) -> list[tuple[float, float]]:
    """Seconds of a forward and of a backward of each stage (`Plan.handling_s`, which remembers them)."""
    cut = [stage.pieces(minibatch_size) for stage in stages]
    took: list[tuple[defaultdict[int, float], defaultdict[int, float]]]
    took = [(defaultdict(float), defaultdict(float)) for _ in stages]
    for end in ends(stages, edges, minibatch_size, problem):
        took[end.stage][end.way][end.device] += end.seconds
    out = []
    for s, pieces in enumerate(cut):
        passes = {replica[0]: 0 for replica in stages[s].replicas}
        for piece in pieces:
            passes[piece.device] += 1
        each = {device: max(passes[replica[0]], 1) for replica in stages[s].replicas for device in replica}
        out.append(tuple(max((total / each[device] for device, total in way.items()), default=0.0) for way in took[s]))
    return out


def sending_s(stages: Sequence[Stage], edges: Sequence[Edge], minibatch_size: int, problem: Problem) -> float:
    """The senders' seconds for all messages of a mini-batch."""
    return sum(end.seconds for end in ends(stages, edges, minibatch_size, problem) if end.sends)


HANDLING = Remembered[tuple[object, ...], list[tuple[float, float]]]()
"""Of stages, edges and mini-batch: what `handling_s` says, which walks over all messages; a prediction asks several times."""
