"""What messages carry: a tensor goes to a device once, however many of its stages read it.

    d0   s0 --- T ---> s1   d1       s1 and s3 are on one device, and both read T. One message brings it to s1, which has it until
                        |            its backward, and s3 gets it from s1 in memory. Backwards s3 gives s1 its gradient of T; s1 adds
                        T            its own, and one message takes the sum to s0.
                        v
                       s3   d1

So nobody needs to know of it but who asks what an edge carries: an edge from s1 to s3 stands in the place of one from s0 to s3.

A stage hands a tensor on to another where that waits for it anyway, forwards and backwards: no step is longer for it, and the tensor
is there until its last reader has had it. Where neither stage waits for the other, as between branches, it does so in a plan of one
micro-batch size, if the tensor's gradient comes back, from the stage that holds no fewer samples: stages whose orders can run
(`gpp.plan.in_flight`) then still can. Replicas that cut samples in different ways, and stages of which only some devices are the
same, each receive the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpp.graph.op_graph import Tensor
from gpp.stage import EdgeTensors, Stage


def carried(
    stages: Sequence[Stage], distance: Sequence[int], read: EdgeTensors, returning: Iterable[tuple[int, int]]
) -> EdgeTensors:
    """The tensors that messages carry over each edge: those that cross it, less those that a stage gets from another of its devices.

    Edges that carry nothing any more are left out; edges between stages of the same devices may be new.

    Args:
        distance: of each stage to the sink.
        read: edge -> the tensors that its second stage reads from its first one; none over one that is an order only.
        returning: edges over which the second stage's backward hands something to the first one's.
    """
    readers: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for (s, t), tensors in read.items():
        for tensor in tensors:
            readers[tensor.name].append((s, t, tensor))
    behind = _behind(len(stages), returning)
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
