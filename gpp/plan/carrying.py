"""What messages carry: a tensor goes to a device once, as far as the stages there that read it can hand it on.

    d0   s0 --- T ---> s1   d1       Stages s1 and s3 are on one device, and both read T. One message brings T to s1, which has
                        |            it until its backward; s3 gets it from s1 in memory. Backwards, s3 gives its gradient of T
                        T            to s1, which adds its own, and one message takes the sum to s0.
                        v
                       s3   d1

An edge from s1 to s3 thus stands in the place of one from s0 to s3, and only those who ask what an edge carries see a difference.

A stage hands a tensor on to another stage that waits for it anyway, forwards and backwards: then no pass is later for it, and
the tensor is there until its last reader has had it. Where neither stage waits for the other, as in two branches, one hands the
tensor on if all stages have one micro-batch size, the gradient of the tensor comes back, and the giver holds as many samples as
the other: stages whose orders can run (`gpp.plan.in_flight`) then still can. Stages on which the samples are dealt out in
different ways, and stages that have only some of their devices in common, each receive the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpp.graph.op_graph import Tensor
from gpp.stage import EdgeTensors, Stage


def carried(
    stages: Sequence[Stage], distance: Sequence[int], read: EdgeTensors, answered: Iterable[tuple[int, int]]
) -> EdgeTensors:
    """The tensors that messages carry over each edge.

    Edges that carry nothing any more are left out; edges between stages of the same devices may be new.

    Args:
        distance: of each stage to the sink.
        read: edge -> the tensors that its second stage reads from its first one; none over one that is an order only.
        answered: edges over which the second stage's backward hands something to the first one's.
    """
    readers: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for (s, t), tensors in read.items():
        for tensor in tensors:
            readers[tensor.name].append((s, t, tensor))
    behind = _behind(len(stages), answered)
    even = len({(stage.microbatch_size, stage.k) for stage in stages}) == 1
    out = {edge: list(tensors) for edge, tensors in read.items()}
    for found in readers.values():
        receivers: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for s, t, tensor in sorted(found, key=lambda one: (-distance[one[1]], one[1])) if len(found) > 1 else ():
            if stages[t].devices == stages[s].devices:
                continue
            own, free = receivers[_cut(stages[t])], even and tensor.differentiable
            givers = (c for c in own if behind[c] >> t & 1 or (free and stages[c].in_flight >= stages[t].in_flight))
            giver = next(givers, None)
            if giver is None:
                own.append(t)
            else:
                out[s, t].remove(tensor)
                out.setdefault((giver, t), []).append(tensor)
    return {edge: tuple(tensors) for edge, tensors in out.items() if tensors or not read.get(edge)}


def _cut(stage: Stage) -> tuple[object, ...]:
    """Which samples each of a stage's devices has: stages that are alike in this hand nothing from one device to another."""
    whole = len(stage.devices) == stage.devices_per_replica
    return stage.devices, stage.devices_per_replica, *(() if whole else (stage.microbatch_size, stage.stride))


def _behind(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The stages that each of so many reaches, as bits; every edge goes from a smaller number to a larger one."""
    out = [0] * count
    for s, t in sorted(edges, reverse=True):
        out[s] |= 1 << t | out[t]
    return out
