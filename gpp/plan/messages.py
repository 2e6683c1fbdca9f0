"""The messages of a plan, from device to device, and the seconds that devices spend on them at either end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpp.cost.problem import Problem, Remembered
from gpp.cost.stage import messages_of
from gpp.routing import BACKWARD, FORWARD, Direction, copies, messages
from gpp.stage import EdgeTensors, Stage

DevicePass = tuple[int, int, int]
"""Stage, device and micro-batch."""

DeviceMessage = tuple[Direction, DevicePass, DevicePass, int, int]
"""Direction, the pass that makes the message, the pass that reads it, and its samples [lo, hi)."""


def device_messages(
    stages: Sequence[Stage], edges: Iterable[tuple[int, int]], returning: Collection[tuple[int, int]], num_samples: int
) -> Iterator[DeviceMessage]:
    """The messages of all edges, edge by edge in the order of the samples.

    Args:
        edges: `Plan.carried`.
        returning: those with messages backwards, `Plan.returning`.

    >>> [message[:3] for message in device_messages(plan.stages, plan.carried(graph), plan.returning(graph), num_samples=1)]
    [('F', (0, 0, 0), (1, 1, 0)), ('B', (1, 1, 0), (0, 0, 0))]
    """
    cut = [stage.pieces(num_samples) for stage in stages]
    group_of = [{replica[0]: replica for replica in stage.replicas} for stage in stages]
    for s, t in edges:
        back = (s, t) in returning
        for makes, made, reads, read, lo, hi in messages(cut[s], cut[t]):
            makers, readers = group_of[s][makes], group_of[t][reads]
            for a, b in copies(makers, readers):
                yield FORWARD, (s, a, made), (t, b, read), lo, hi
            for b, a in copies(readers, makers) if back else ():
                yield BACKWARD, (t, b, read), (s, a, made), lo, hi


class MessageBytes(NamedTuple):
    """Bytes that go over an edge.

    Args:
        forward, backward: for each sample.
        beside: in each message forwards, beside its samples.
    """

    forward: float
    backward: float
    beside: float


class Handled(NamedTuple):
    """One end of a message: seconds of a device, in a stage's pass.

    Args:
        way: of the pass.
        sends: whether this end is the sender's.
    """

    stage: int
    way: Direction
    device: int
    sends: bool
    seconds: float


def ends(
    stages: Sequence[Stage],
    carried: EdgeTensors,
    returning: Collection[tuple[int, int]],
    sizes: Mapping[tuple[int, int], MessageBytes],
    minibatch_size: int,
    problem: Problem,
) -> Iterator[Handled]:
    """Both ends of every message of a mini-batch between two devices (`Plan.handled`); what codes messages is in them."""
    coders, costs = [messages_of(stage) for stage in stages], problem.overheads
    returned = {edge: sum(tensor.differentiable for tensor in tensors) for edge, tensors in carried.items()}
    for way, (s, src, _), (t, dst, _), lo, hi in device_messages(stages, carried, returning, minibatch_size):
        if src == dst:
            continue
        coded = 0.0, 0.0
        if way == FORWARD:
            tensors, (coder, value) = carried[s, t], coders[s]
            num_bytes, count = sizes[s, t].forward * (hi - lo), len(tensors)
            coded = coder.coding_s(problem, value, t, tensors, hi - lo, (src, dst))
        else:
            num_bytes, count = sizes[t, s].backward * (hi - lo), returned[t, s]
        yield Handled(s, way, src, True, costs.send_s(num_bytes, count) + coded[0])
        yield Handled(t, way, dst, False, costs.receive_s(num_bytes, count) + coded[1])


def handling_s(stages: Sequence[Stage], handled: Iterable[Handled], minibatch_size: int) -> list[tuple[float, float]]:
    """Seconds that a device of each stage spends on messages in a forward and in a backward: means over a mini-batch.

    The device that has most to do decides. What a device hands to itself costs nothing.
    """
    took: dict[tuple[int, Direction], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for end in handled:
        took[end.stage, end.way][end.device] += end.seconds
    passes = [_passes(stage, minibatch_size) for stage in stages]

    def mean_s(s: int, way: Direction) -> float:
        return max((total / passes[s][device] for device, total in took[s, way].items()), default=0.0)

    return [(mean_s(s, FORWARD), mean_s(s, BACKWARD)) for s in range(len(stages))]


def _passes(stage: Stage, num_samples: int) -> dict[int, int]:
    """Device of a stage -> the passes of one direction that it has a part in, one at least."""
    count = dict.fromkeys(stage.devices, 0)
    for piece in stage.pieces(num_samples):
        for device in stage.replica_of(piece.device):
            count[device] += 1
    return {device: max(passes, 1) for device, passes in count.items()}


HANDLING = Remembered[tuple[object, ...], list[tuple[float, float]]]()
"""Of stages, edges and mini-batch: what `handling_s` says, which walks over all messages; a prediction asks several times."""
