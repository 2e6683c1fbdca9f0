"""Devices that share processors, against a simulation in small steps of time that knows neither events nor waits."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from gpp import Link, OneFOneB, Plan, uniform
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.plan.build import make_plan
from gpp.program.program import Program
from gpp.simulate.simulator import simulate
from tests.simulate.test_recurrence import random_dag
from tests.support.graphs import DEVICE
from tests.support.long import thinned
from tests.support.programs import lower

DT = 1 / 256
STEPS = 7


def posed(seed: int, processors: int | None) -> tuple[Program, Plan, Problem]:
    """A random graph on three or four devices, in micro-batches of two samples."""
    rng = random.Random(seed)
    num = rng.choice([3, 4])
    graph = random_dag(rng, num)
    graph = replace(graph, ops=tuple(replace(op, params=op.params[:1]) for op in graph.ops))
    link = Link(latency_s=0.25, bandwidth_bytes_per_s=100)
    cluster = uniform(name="c", num_nodes=1, devices_per_node=num, device=DEVICE, intra_node=link)
    cluster = replace(cluster, processors=processors)
    problem = Problem(graph=graph, cluster=cluster, cost=Constant(fixed_s=0.2), minibatch_size=8)
    plan = make_plan(problem, "test", [(1 << op, 1) for op in range(num)], 2, chain=rng.random() < 0.3)
    return lower(plan, graph, OneFOneB()), plan, problem


def in_small_steps(program: Program, plan: Plan, problem: Problem, processors: int) -> float:
    """Period of the middle ones of `STEPS` steps: every device walks its list, and those that compute share what there is."""
    link, bills = problem.cluster.intra_node, plan.bills(problem)
    sizes = {edge: sum(t.bytes_per_sample for t in tensors) for edge, tensors in plan.edge_tensors(problem.graph).items()}
    back = {
        (t, s): sum(x.bytes_per_sample for x in tensors if x.differentiable)
        for (s, t), tensors in plan.edge_tensors(problem.graph).items()
    }
    lists = {device: list(actions) * STEPS for device, actions in program.actions.items()}
    at, wanted = dict.fromkeys(lists, 0), {device: [] for device in lists}
    sent: dict[tuple, list[float]] = defaultdict(list)
    received: dict[tuple, int] = defaultdict(int)
    left: dict[int, float] = {}
    free: dict[tuple, float] = defaultdict(float)
    ends: list[float] = []
    now = 0.0
    while any(at[d] < len(lists[d]) for d in lists):
        for device, actions in lists.items():
            while device not in left and at[device] < len(actions):
                a = actions[at[device]]
                if a.kind.startswith("R") and a.peer_device >= 0:
                    channel = (a.kind[1:], a.peer_stage, a.stage)
                    wanted[device].append((channel, received[channel], a.microbatch, a.kind[1:], a.stage))
                    received[channel] += 1
                elif a.kind in ("SF", "SB"):
                    size = (sizes if a.kind == "SF" else back)[a.stage, a.peer_stage] * (a.hi - a.lo) or 1.0
                    channel = (a.kind[1:], a.stage, a.peer_stage)
                    free[channel] = max(free[channel], now) + size / link.bandwidth_bytes_per_s
                    sent[channel].append(free[channel] + link.latency_s)
                elif a.kind in ("F", "B"):
                    mine = [w for w in wanted[device] if w[2:] == (a.microbatch, a.kind, a.stage)]
                    if any(len(sent[w[0]]) <= w[1] or sent[w[0]][w[1]] > now for w in mine):
                        break
                    wanted[device] = [w for w in wanted[device] if w not in mine]
                    left[device] = bills[a.stage].forward_s if a.kind == "F" else bills[a.stage].backward_s
                    break
                else:
                    assert a.kind == "U"
                    left[device] = bills[a.stage].update_s
                    break
                at[device] += 1
                if not at[device] % (len(actions) // STEPS):
                    ends.append(now)
        busy = list(left)
        for device in busy:
            left[device] -= DT * min(1.0, processors / len(busy))
            if left[device] <= 1e-9:
                del left[device]
                at[device] += 1
                if not at[device] % (len(lists[device]) // STEPS):
                    ends.append(now + DT)
        now += DT
    ends.sort()
    num = len(lists)
    last = [max(ends[k * num : (k + 1) * num]) for k in range(STEPS)]
    return (last[-2] - last[2]) / (STEPS - 4)


@pytest.mark.parametrize("seed", thinned(range(4), 4))
def test_the_period_is_that_of_small_steps(seed: int) -> None:
    processors = 1 + seed % 2
    program, plan, problem = posed(seed, processors)
    found = simulate(program, plan, problem).metrics.iteration_s
    passes = 2 * len(plan.stages) * 4
    assert found == pytest.approx(in_small_steps(program, plan, problem, processors), abs=DT * passes)
    assert found > simulate(*posed(seed, None)).metrics.iteration_s


def test_as_many_processors_as_devices_change_nothing() -> None:
    own = simulate(*posed(3, None)).metrics
    assert simulate(*posed(3, 4)).metrics == own


def test_a_processor_alone_does_all_the_work_one_after_the_other() -> None:
    program, plan, problem = posed(5, 1)
    bills = plan.bills(problem)
    work = sum(4 * (bill.forward_s + bill.backward_s) + bill.update_s for bill in bills)
    found = simulate(program, plan, problem).metrics.iteration_s
    assert work * (1 - 1e-3) <= found <= 1.25 * work
