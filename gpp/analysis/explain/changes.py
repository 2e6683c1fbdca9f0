"""Plans and clusters with one change, to be simulated or planned for again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpp.cluster import Cluster, Device, Link
from gpp.cost.problem import Problem
from gpp.graph.op_graph import mask_of
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.planners.common.moves import is_chain
from gpp.stage import Stage


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with `factor` times the memory on every device."""
    return replace(cluster, devices=tuple(replace(d, memory_bytes=d.memory_bytes * factor) for d in cluster.devices))


def with_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links on which every message takes `1 / factor` of the time."""

    def faster(link: Link) -> Link:
        return replace(link, latency_s=link.latency_s / factor, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)

    def with_own(device: Device) -> Device:
        own = device.bandwidth_bytes_per_s
        return device if own is None else replace(device, bandwidth_bytes_per_s=own * factor)

    return replace(
        cluster,
        devices=tuple(map(with_own, cluster.devices)),
        intra_node=faster(cluster.intra_node),
        inter_node=faster(cluster.inter_node),
        links=tuple(replace(pair, link=faster(pair.link)) for pair in cluster.links),
    )


def with_twice_the_devices(cluster: Cluster) -> Cluster:
    """The cluster and a copy of all its nodes."""
    beyond = max(cluster.nodes) + 1
    nodes = [node + beyond for node in cluster.nodes]
    return cluster.with_copies(range(cluster.num_devices), nodes)


def _with_microbatch(plan: Plan, problem: Problem, factor: float) -> Plan | None:
    """The plan with micro-batches `factor` times as large; None where a size does not divide the mini-batch."""
    # A loss on the whole mini-batch keeps its size.
    whole = [bool(mask_of(stage.ops) & problem.minibatch_ops) for stage in plan.stages]
    pieces = list[Stage]()
    for stage, kept in zip(plan.stages, whole, strict=True):
        size = stage.microbatch_size * (1 if kept else factor)
        if size < 1 or size != int(size) or plan.minibatch_size % int(size):
            return None
        pieces.append(replace(stage, microbatch_size=int(size)))
    return _remade(plan, problem, pieces) if all(_dealt_out(piece, plan) for piece in pieces) else None


def with_other_microbatches(plan: Plan, problem: Problem) -> list[tuple[str, Plan]]:
    """The plan with half and with twice the micro-batch, as far as these sizes divide the mini-batch; each with its words."""
    made = ((words, _with_microbatch(plan, problem, factor)) for factor, words in ((0.5, "half"), (2.0, "twice")))
    return [(f"{words} the micro-batch", other) for words, other in made if other is not None]


def split_stages(plan: Plan, problem: Problem, stages: Sequence[int]) -> tuple[Plan, Problem] | None:
    """The plan with each of `stages` cut in two, each half on as many devices of its kind.

    The further devices stand in the same nodes; the problem returned has them. The result is None where a stage has a
    single operator.
    """

    def halves(stage: Stage, more: tuple[int, ...]) -> list[Stage] | None:
        if len(stage.ops) < 2:
            return None
        cut = balanced_cut(stage, problem)
        return [stage.within(stage.ops[:cut]), replace(stage.within(stage.ops[cut:]), devices=more)]

    return _on_twice_the_devices(plan, problem, stages, halves)


def replicate_stages(plan: Plan, problem: Problem, stages: Sequence[int]) -> tuple[Plan, Problem] | None:
    """The plan with twice the replicas of each of `stages`; None where a micro-batch cannot be dealt out to so many."""

    def wider(stage: Stage, more: tuple[int, ...]) -> list[Stage] | None:
        wide = replace(stage, devices=stage.devices + more)
        return [wide] if _dealt_out(wide, plan) else None

    return _on_twice_the_devices(plan, problem, stages, wider)


def _dealt_out(stage: Stage, plan: Plan) -> bool:
    """Whether replicas get equal shares of a micro-batch, and equally many micro-batches."""
    count = -(-plan.minibatch_size // stage.microbatch_size)
    return stage.unit % len(stage.replicas) == 0 and count % stage.stride == 0


def balanced_cut(stage: Stage, problem: Problem) -> int:
    """The number of a stage's first operators that make one half, so that the slower half is as fast as possible."""
    times = problem.op_times(-(-stage.unit // len(stage.replicas)), stage.devices[0])
    seconds = [float(times.forward_s[op] + times.backward_s[op]) for op in stage.ops]
    return min(range(1, len(seconds)), key=lambda cut: max(sum(seconds[:cut]), sum(seconds[cut:])))


def _on_twice_the_devices(
    plan: Plan, problem: Problem, stages: Sequence[int], change: Callable[[Stage, tuple[int, ...]], list[Stage] | None]
) -> tuple[Plan, Problem] | None:
    """The plan after `change` on each of `stages`, which gets as many further devices of its kind in its nodes."""
    pieces: list[Stage] = []
    cluster, copied = problem.cluster, list[int]()
    for s, stage in enumerate(plan.stages):
        if s not in stages:
            pieces.append(stage)
            continue
        count = cluster.num_devices + len(copied)
        more = tuple(range(count, count + len(stage.devices)))
        changed = change(stage, more)
        if changed is None:
            return None
        pieces += changed
        copied += stage.devices
    larger = replace(problem, cluster=cluster.with_copies(copied, [cluster.nodes[d] for d in copied]))
    return _remade(plan, larger, pieces), larger


def _remade(plan: Plan, problem: Problem, pieces: list[Stage]) -> Plan:
    """A plan of these stages in this order, on their own devices, with new edges and samples in flight."""
    made = make_plan(
        problem,
        plan.planner,
        [(mask_of(stage.ops), len(stage.devices)) for stage in pieces],
        [stage.microbatch_size for stage in pieces],
        chain=is_chain(plan, problem.graph),
        ordered=True,
        sharing=[stage.sharing for stage in pieces],
    )
    stages = [replace(stage, in_flight=new.in_flight) for stage, new in zip(pieces, made.stages, strict=True)]
    return replace(made, stages=tuple(stages))
