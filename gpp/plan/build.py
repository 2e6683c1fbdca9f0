"""Plans made from a partition of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.graph.op_graph import OpGraph, bits
from gpp.graph.order import kahn
from gpp.plan.in_flight import in_flight_samples
from gpp.plan.plan import Plan
from gpp.stage import AbstractStageValue, Stage


def make_plan(
    problem: Problem,
    planner: str,
    parts: Sequence[tuple[int, int]],
    microbatch_size: int | Sequence[int],
    *,
    k: int | Sequence[int] = 1,
    chain: bool = False,
    ordered: bool = False,
    placement: Sequence[tuple[int, ...]] | None = None,
    sharing: AbstractStageValue | Sequence[AbstractStageValue | None] | None = None,
    explanation: tuple[str, ...] = (),
) -> Plan:
    """A plan from a partition.

    Stages are put into a topological order (ties: smallest operator first), in-flight samples follow
    from the successors (`required_in_flight`), devices are dealt out as contiguous ranges in stage order if not placed.

    Args:
        parts: (operator mask, number of devices) for each stage, in any order.
        microbatch_size, k, sharing: one for all stages, or one for each part; `sharing` as `Stage` has it.
        chain: add an order edge between neighbours, which makes the stage graph a chain.
        ordered: the parts are given in a topological order that is to be kept.
        placement: devices of each part, if `ordered`.

    Raises:
        InvalidPlan: the parts are no partition of the operators, or have sizes that are no numbers of samples; the stage graph has
            a cycle, or `ordered` parts are in no topological order.

    >>> print(make_plan(problem, "mine", [(0b01, 1), (0b10, 1)], microbatch_size=1))
    mine: depth 2, mini-batch 4
    stage  operators  devices  micro-batch  in flight  next
    s0     1          d0       1            2          s1
    s1     1          d1       1            1
    """
    graph = problem.graph
    sizes = [microbatch_size] * len(parts) if isinstance(microbatch_size, int) else list(microbatch_size)
    ks = [k] * len(parts) if isinstance(k, int) else list(k)
    _check_parts(graph, parts, sizes)
    values = list(sharing) if isinstance(sharing, Sequence) else [sharing] * len(parts)
    owner = {op: p for p, (mask, _) in enumerate(parts) for op in bits(mask)}
    succ: list[set[int]] = [set() for _ in parts]
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            if owner[consumer] != owner[tensor.producer]:
                succ[owner[tensor.producer]].add(owner[consumer])
    if ordered and any(q < p for p in range(len(parts)) for q in succ[p]):
        raise InvalidPlan("the parts are not in a topological order")
    order = list(range(len(parts))) if ordered else kahn(succ, key=[(mask & -mask).bit_length() for mask, _ in parts])
    if len(order) < len(parts):
        raise InvalidPlan("the stage graph has a cycle")
    position = {p: s for s, p in enumerate(order)}
    edges = {(position[p], position[q]) for p in range(len(parts)) for q in succ[p]}
    if chain:
        edges |= {(s, s + 1) for s in range(len(parts) - 1)}
    shapes = [(sizes[p], ks[p], value.stride(parts[p][1]) if (value := values[p]) else 1) for p in order]
    drained = problem.minibatch_size if problem.regime.weights.flushes else None
    in_flight = in_flight_samples(shapes, edges, drained, problem.regime.holds)
    stages, device = [], 0
    for s, p in enumerate(order):
        mask, count = parts[p]
        stages.append(
            Stage(
                ops=tuple(bits(mask)),
                devices=tuple(range(device, device + count)) if placement is None else placement[p],
                microbatch_size=sizes[p],
                in_flight=in_flight[s],
                k=ks[p],
                mechanisms=(value,) if (value := values[p]) else (),
            )
        )
        device += count
    return Plan(
        planner=planner,
        stages=tuple(stages),
        edges=tuple(sorted(edges)),
        minibatch_size=problem.minibatch_size,
        graph_fingerprint=graph.fingerprint,
        explanation=explanation,
    )


def _check_parts(graph: OpGraph, parts: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
    """Refuse what makes no plan, with the operator or the number in question."""
    seen = 0

    def names(mask: int) -> str:
        every = [f"{op} ({graph.ops[op].name})" if op < graph.num_ops else str(op) for op in bits(mask)]
        return ", ".join(every[:5]) + (f" and {len(every) - 5} more" if len(every) > 5 else "")

    for mask, _ in parts:
        if mask & seen:
            raise InvalidPlan(f"operator {names(mask & seen)} is in two stages: each operator is in one")
        seen |= mask
    if seen != graph.all_mask:
        wrong, rule = (
            (left, "is in no stage") if (left := graph.all_mask & ~seen) else (seen & ~graph.all_mask, "is none of the graph")
        )
        raise InvalidPlan(f"operator {names(wrong)} {rule}: the stages hold operators 0 to {graph.num_ops - 1}")
    if odd := [b for b in sizes if not isinstance(b, Integral) or b < 1]:
        raise InvalidPlan(f"a micro-batch of {odd[0]!r} samples: write a whole number above 0")
