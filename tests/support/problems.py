"""Problems for the planners' tests, and a second opinion on their times."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from gpp import Cluster, Device, Link, OneFOneB, Plan, Strategy, uniform
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import Infeasible
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor, Variant, bits
from gpp.graph.random_graphs import random_dag, random_series_parallel
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.planners.base import AbstractPlanner
from tests.oracle.passes import ends_of
from tests.support.graphs import chain

FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(AbstractCostModel):
    """Operators at a fixed rate plus a fixed cost for each pass; updates at the memory's rate."""

    flop_per_s: float = 1e12
    fixed_s: float = 2e-4

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        forward = np.array([op.forward_flops for op in graph.ops]) * samples * graph.shares(degree) / self.flop_per_s + self.fixed_s
        own = forward / device.speed_factor
        return OpTimes(forward_s=own, backward_s=2 * own, weight_s=own * (graph.amounts.weight_flops > 0))

    def update_s(self, num_bytes: float, device: Device) -> float:
        return num_bytes / device.memory_bandwidth_bytes_per_s

    def move_s(self, num_bytes: float, device: Device) -> float:
        return 0.0


def cluster(
    num_devices: int,
    memory_bytes: float = 1e15,
    link: Link = FREE,
    inter: Link | None = None,
    num_nodes: int = 1,
    network_cards: int = 1,
) -> Cluster:
    device = Device(kind="cuda", memory_bytes=memory_bytes, peak_flop_per_s={"float32": 1e13}, memory_bandwidth_bytes_per_s=1e12)
    return uniform(
        name="test",
        num_nodes=num_nodes,
        devices_per_node=num_devices // num_nodes,
        device=device,
        intra_node=link,
        inter_node=inter,
        network_cards=network_cards,
    )


def random_problem(seed: int, *, max_ops: int, max_devices: int, series_parallel: bool | None = None) -> Problem:
    """Any graph, cluster, batch; `series_parallel` None draws that too."""
    rng = random.Random(seed)
    num_ops = rng.randint(2, max_ops)
    devices = rng.randint(1, min(num_ops, max_devices))
    if series_parallel is None:
        series_parallel = rng.random() < 0.7
    graph = (random_series_parallel if series_parallel else random_dag)(num_ops, seed, skew=rng.choice([0.0, 0.5, 1.0]))
    nodes = 2 if devices % 2 == 0 and rng.random() < 0.3 else 1
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=rng.choice([1e9, 4e10]))
    inter = Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9)
    return Problem(
        graph=graph,
        cost=Rate(),
        minibatch_size=rng.choice([8, 12, 16]),
        optimizer_state_factor=rng.choice([0.0, 2.0]),
        cluster=cluster(devices, rng.choice([1e12, 2.5e7, 1.5e7]), link, inter, nodes, network_cards=2),
    )


def uneven(problem: Problem, seed: int) -> Problem:
    """The same on devices of unequal speed and memory."""
    rng = random.Random(seed)
    devices = tuple(
        replace(d, speed_factor=rng.choice([1.0, 0.5, 2.0]), memory_bytes=d.memory_bytes * rng.choice([1.0, 0.7, 1.5]))
        for d in problem.cluster.devices
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def random_partition(graph: OpGraph, num_parts: int, rng: random.Random) -> list[int]:
    """Convex parts with an acyclic quotient: grow down-sets of a random topological order."""
    indegree = {op: sum(1 for _ in bits(graph.predecessors[op])) for op in range(graph.num_ops)}
    ready, order = [op for op, count in indegree.items() if not count], []
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        order.append(op)
        for after in bits(graph.successors[op]):
            indegree[after] -= 1
            if not indegree[after]:
                ready.append(after)
    cuts = sorted(rng.sample(range(1, graph.num_ops), num_parts - 1))
    return [sum(1 << op for op in order[a:b]) for a, b in zip([0, *cuts], [*cuts, graph.num_ops], strict=True)]


def towers(
    num_branches: int,
    num_blocks: int,
    *,
    fork: bool = False,
    forward: float = 1.0,
    saved: float = 1.0,
    names: list[str] | None = None,
) -> OpGraph:
    """Equal branches of equal blocks and a join that costs next to nothing; one tensor between neighbours."""
    ops: list[Op] = []
    edges: dict[int, list[int]] = {}

    def add(name: str, seconds: float, kept: float, num_bytes: int) -> int:
        ops.append(
            Op(
                name=name,
                forward_flops=seconds,
                backward_flops=2 * seconds,
                saved_bytes=kept,
                params=(f"{name}.weight",) if num_bytes else (),
            )
        )
        return len(ops) - 1

    root = add("fork", forward / 100, 0.0, 0) if fork else None
    ends = []
    for branch in names or [f"b{i}" for i in range(num_branches)]:
        last = root
        for block in range(num_blocks):
            op = add(f"{branch}.{block}", forward, saved, 1)
            if last is not None:
                edges.setdefault(last, []).append(op)
            last = op
        ends.append(last)
    join = add("join", forward / 100, 0.0, 0)
    for end in ends:
        edges.setdefault(end, []).append(join)
    params = tuple(Param(name=f"{op.name}.weight", num_bytes=1) for op in ops if op.params)
    tensors = tuple(Tensor(name=f"t{a}", producer=a, consumers=tuple(c), bytes_per_sample=1e-3) for a, c in edges.items())
    return OpGraph(name="towers", ops=tuple(ops), params=params, tensors=tensors)


def run(planner: AbstractPlanner, problem: Problem) -> tuple[Plan, float] | None:
    """The validated plan and its predicted seconds under 1F1B; None if infeasible."""
    strategy = Strategy(name="test", planner=planner, schedule=OneFOneB())
    try:
        plan = strategy.plan(problem)
    except Infeasible:
        return None
    return plan, strategy.predict(plan, problem, record=False).metrics.iteration_s


def one_f_one_b_s(plan: Plan, problem: Problem) -> float:
    """Seconds of a 1F1B iteration on links that cost nothing, by the definition."""
    b = plan.stages[0].microbatch_size
    m = plan.minibatch_size // b
    took = [problem.stage_times(stage.ops, b, stage.devices) for stage in plan.stages]
    lists = []
    for s, stage in enumerate(plan.stages):
        ahead = min(stage.in_flight // b, m)
        pairs = [each for i in range(m) for each in ((s, 1, i), (s, 0, ahead + i)) if each[2] < m]
        lists.append([*((s, 0, i) for i in range(ahead)), *pairs])

    def needs(task: tuple[int, int, int]) -> list[tuple[tuple[int, int, int], float]]:
        s, kind, i = task
        return [((other, kind, i), 0.0) for other in (plan.successors if kind else plan.predecessors)[s]]

    ends = ends_of(lists, needs, lambda task: took[task[0]][task[1]])
    assert ends, "1F1B cannot deadlock"
    return max(ends.values())


HALF = Variant(degree=2, forward=0.2, backward=0.4, params=0.5, saved_bytes=6.0, receive=((0, 3.0),))


def split_problem(num_devices: int = 5, link: Link | None = None) -> Problem:
    """A chain of three; the middle operator can be split over two devices."""
    graph = chain(3, saved=10.0)
    ops = list(graph.ops)
    ops[1] = replace(ops[1], params=("w",), variants=(HALF,))
    graph = replace(graph, ops=tuple(ops), params=(Param(name="w", num_bytes=100),))
    link = link or Link(latency_s=0.0, bandwidth_bytes_per_s=10.0)
    return Problem(graph=graph, cluster=cluster(num_devices, 1e6, link), cost=Constant(), minibatch_size=8, microbatch_size=2)


def split_plan(problem: Problem, replicas: int = 1) -> Plan:
    plan = make_plan(problem, "x", [(1, 1), (2, 2 * replicas), (4, 1)], 2, chain=True, ordered=True)
    stages = list(plan.stages)
    stages[1] = stages[1].having(TensorParallel(degree=2))
    return replace(plan, stages=tuple(stages))
