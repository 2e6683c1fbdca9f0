"""What PipeDream's and Piper's objectives say of any chain, by hand: the ring, the update and the messages are written out here."""

from __future__ import annotations

from gpp.cluster import Link
from gpp.cost.problem import Problem
from gpp.plan.plan import Plan


def ring_s(problem: Problem, num_bytes: float, replicas: int) -> float:
    """Ring all-reduce over the first devices, at the pace of the slowest link that the ring takes."""
    cluster = problem.cluster
    if replicas < 2 or not num_bytes:
        return 0.0
    links = [cluster.intra_node] if cluster.nodes[0] == cluster.nodes[1] else []
    links += [cluster.inter_node] if cluster.nodes[replicas - 1] != cluster.nodes[0] else []
    rate, cards = cluster.collective_efficiency, 1
    if len(set(used := cluster.nodes[:replicas])) > 1:
        # Of each node's network cards the share of its devices that take part; the node with the fewest decides.
        shares = {node: cluster.network_cards * used.count(node) // cluster.nodes.count(node) for node in used}
        cards = min(min(max(1, share), used.count(node)) for node, share in shares.items())
    over = {id(cluster.inter_node): cards}
    steps = [link.latency_s + num_bytes / replicas / (rate * link.bandwidth_bytes_per_s * over.get(id(link), 1)) for link in links]
    return 2 * (replicas - 1) * max(steps)


def _stages(plan: Plan, problem: Problem) -> list[tuple[float, float, float]]:
    """For each stage: seconds of a micro-batch with its share of what follows the mini-batch, bytes read in, bytes handed out."""
    graph, out = problem.graph, []
    for stage in plan.stages:
        b, r, ops = stage.microbatch_size, len(stage.devices), set(stage.ops)
        times = problem.cost.op_times(graph, b // r, problem.cluster.devices[0])
        names = {name for op in ops for name in graph.ops[op].params if graph.param_of[name].trainable}
        held = float(sum(graph.param_of[name].num_bytes for name in names))
        finish = ring_s(problem, held, r) + problem.cost.update_s(held, problem.cluster.devices[0])
        enters = leaves = 0.0
        for tensor in graph.tensors:
            size = tensor.bytes_per_sample * (1 + tensor.differentiable) * b / r
            inside = set(tensor.consumers) & ops
            leaves += size if tensor.producer in ops and set(tensor.consumers) - ops else 0.0
            enters += size if tensor.producer not in ops and inside else 0.0
        compute = sum(float(times.forward_s[op] + times.backward_s[op]) for op in ops)
        out.append((compute + finish * b / plan.minibatch_size, enters, leaves))
    return out


def piper_s(plan: Plan, problem: Problem, link: Link | None = None) -> float:
    """The slowest stage; compute, messages of both borders over a link (None: inside nodes) and all-reduce after each other."""
    bandwidth = (link or problem.cluster.intra_node).bandwidth_bytes_per_s
    return max(seconds + (enters + leaves) / bandwidth for seconds, enters, leaves in _stages(plan, problem))


def pipedream_s(plan: Plan, problem: Problem) -> float:
    """The slowest stage or cut; everything that crosses a cut goes over the links of the stages on either side."""
    graph, bandwidth, worst = problem.graph, problem.cluster.intra_node.bandwidth_bytes_per_s, 0.0
    owner = {op: s for s, stage in enumerate(plan.stages) for op in stage.ops}
    for s, (seconds, _, _) in enumerate(_stages(plan, problem)):
        stage = plan.stages[s]
        share = stage.microbatch_size / len(stage.devices)
        for before in (s, s + 1):
            live = sum(
                tensor.bytes_per_sample * (1 + tensor.differentiable)
                for tensor in graph.tensors
                if owner[tensor.producer] < before and any(owner[c] >= before for c in tensor.consumers)
            )
            worst = max(worst, live * share / bandwidth)
        worst = max(worst, seconds)
    return worst
