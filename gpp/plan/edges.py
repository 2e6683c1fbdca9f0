"""The bits of a plan's messages, as the strategy's `edges` ask for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gpp.cost.edges import Edges, Kept, coded, most_bits, sent_bytes
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.routing import copies, messages


def check_edges(edges: Edges, *, serves: bool) -> None:
    """Refuse quantised messages where gradients are made.

    Args:
        serves: whether requests are answered, and nothing is trained.

    Raises:
        InvalidConfig: names the setting.
    """
    if edges.bits is not None and not serves:
        rule = "is for mode=inference: no gradient passes a message whose values were rounded"
        raise InvalidConfig("strategy.edges.bits", edges.bits, rule, "set mode=inference, or strategy.edges.bits=null")


def with_edges(plan: Plan, problem: Problem) -> Plan:
    """The plan with the bits that the strategy's edges say (`problem.regime.edges`).

    With `auto`, each edge has the most bits with which all its channels keep up with the target rate; without one, with the slowest
    stage.
    """
    edges = problem.regime.edges
    if edges.bits is None:
        return replace(plan, edge_bits=(), edge_clip=False, edge_auto=False) if plan.edge_bits else plan
    tensors = plan.edge_tensors(problem.graph)
    bits = {edge: edges.bits_of(own) for edge, own in tensors.items()}
    if edges.bits == "auto":
        plan = replace(plan, edge_auto=True)
        asked = kept(plan, problem)
        assert asked is not None, "the bits change"
        for edge, own in tensors.items():
            if bits[edge]:
                dtype, room = problem.graph.dtype, bytes_within(plan, problem, edge, asked.sample_s)
                bits[edge] = most_bits(lambda b, own=own, dtype=dtype: sum(sent_bytes(x, b, dtype) for x in own), room)
    changing = edges.bits == "auto"
    return replace(plan, edge_bits=tuple(bits[edge] for edge in plan.edges), edge_clip=edges.clip, edge_auto=changing)


def slowest_stage_s(plan: Plan, problem: Problem) -> float:
    """Seconds that the slowest stage takes for each sample, its replicas together."""
    return max(
        bill.forward_s / (stage.microbatch_size * stage.round_robin_degree)
        for bill, stage in zip(plan.bills(problem), plan.stages, strict=True)
    )


def kept(plan: Plan, problem: Problem) -> Kept | None:
    """The pace and bits that senders keep to; None where bits do not change."""
    edges = problem.regime.edges
    if not plan.edge_auto:
        return None
    plain = replace(plan, edge_bits=(), edge_clip=False, edge_auto=False)
    sample_s = 1.0 / edges.target_rate if edges.target_rate else slowest_stage_s(plain, problem)
    return Kept(sample_s=sample_s, window=edges.window)


def announcing(plan: Plan, graph: OpGraph) -> set[tuple[int, int]]:
    """Edges whose messages say how many bits a later one has, because that may change."""
    return {edge for edge, own in plan.edge_tensors(graph).items() if plan.edge_auto and any(map(coded, own))}


def carried(plan: Plan, edge: tuple[int, int]) -> dict[tuple[int, int], float]:
    """Sender and receiver -> the share of all samples that goes from one to the other, for every channel of an edge."""
    s, t = edge
    first_of = [{replica[0]: replica for replica in plan.stages[end].replicas} for end in edge]
    out: dict[tuple[int, int], float] = defaultdict(float)
    for route in messages(plan.stages[s].pieces(plan.minibatch_size), plan.stages[t].pieces(plan.minibatch_size)):
        for src, dst in copies(first_of[0][route.src_device], first_of[1][route.dst_device]):
            if src != dst:
                out[src, dst] += (route.hi - route.lo) / plan.minibatch_size
    return out


def bytes_within(plan: Plan, problem: Problem, edge: tuple[int, int], sample_s: float) -> float:
    """Bytes for each sample with which every channel of an edge keeps up with a sample each `sample_s` seconds."""
    channels = carried(plan, edge).items()
    rates = (problem.cluster.link(src, dst).bandwidth_bytes_per_s / share for (src, dst), share in channels)
    return min(rates, default=float("inf")) * sample_s
