"""The graph of waits against independent ways to run a program: queues that know only what each action needs, a longest path."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest

from gpp import GPipe, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.errors import MalformedProgram
from gpp.plan.build import make_plan
from gpp.program.program import Program, check_program, reduce_groups
from gpp.runtime.job import _checked
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.recurrence import can_score, score
from gpp.simulate.simulator import Costs, simulate
from tests.oracle.executor import PASSES, RECEIVES, SENDS, runs
from tests.simulate.test_recurrence import NODES, Updates, random_dag
from tests.support.host import on_host
from tests.support.long import thinned
from tests.support.programs import lower

Case = tuple[Program, Plan, Problem]


def random_case(seed: int, host: Callable[[random.Random, Problem, Plan], tuple[Problem, Plan]] | None = None) -> Case:
    """A small program: branches, replicas, unequal micro-batches, sometimes stages that share a device.

    Args:
        host: puts operators of a plan on the host.
    """
    rng = random.Random(seed)
    n = rng.randint(2, 6)
    graph = random_dag(rng, n)
    prob = Problem(graph=graph, cluster=NODES, cost=Updates(fixed_s=0.2), minibatch_size=8, global_norm=rng.random() < 0.3)
    sizes = [rng.choice([2, 4, 8])] * n if rng.random() < 0.5 else [rng.choice([2, 4, 8]) for _ in range(n)]
    parts = [(1 << op, rng.choice([1, 1, 2])) for op in range(n)]
    schedule = rng.choice([OneFOneB(), GPipe()])
    if rng.random() < 0.3:
        where = [tuple(sorted(rng.sample(range(max(n // 2, 2)), count))) for _, count in parts]
        plan = make_plan(prob, "test", parts, sizes, placement=where, ordered=True)
    else:
        plan = make_plan(prob, "test", parts, sizes)
    prob, plan = host(rng, prob, plan) if host else (prob, plan)
    return lower(plan, graph, schedule, global_norm=prob.global_norm), plan, prob


def mutated(program: Program, rng: random.Random) -> Program:
    """One to three small changes: two actions exchanged, one dropped, doubled or moved, a number or a kind changed."""
    actions = {device: list(own) for device, own in program.actions.items()}
    for _ in range(rng.choice([1, 1, 2, 3])):
        own = actions[rng.choice([device for device in actions if len(actions[device]) > 1])]
        i, j = rng.randrange(len(own)), rng.randrange(len(own))
        match rng.choice(["swap", "swap", "move", "move", "drop", "double", "number", "kind"]):
            case "swap":
                own[i], own[j] = own[j], own[i]
            case "move":
                own.insert(j, own.pop(i))
            case "drop":
                own.pop(i)
            case "double":
                own.insert(j, own[i])
            case "number":
                field = rng.choice(["microbatch", "stage", "lo", "peer_device"])
                own[i] = own[i]._replace(**{field: getattr(own[i], field) + rng.choice([-1, 1])})
            case _:
                own[i] = own[i]._replace(
                    kind=rng.choice(["F", "B", "U", "R", "N", "O", "P"][: 7 if any(a.kind == "O" for a in own) else 5])
                )
    return replace(program, actions={device: tuple(own) for device, own in actions.items()})


def test_what_is_accepted_runs_and_what_runs_is_accepted() -> None:
    """With operators on the host; without: test_generated."""
    accepted = refused = 0
    for seed in range(60):
        program, plan, prob = random_case(seed, on_host)
        groups = reduce_groups(plan, prob.graph)
        members = {g: set(group.devices) for g, group in enumerate(groups)} | {-1: set(program.actions)}
        check_program(program, groups)
        assert runs(program, members)
        rng = random.Random(seed)
        for _ in range(12):
            changed = mutated(program, rng)
            try:
                check_program(replace(changed), groups)
            except MalformedProgram:
                refused += 1
                assert not runs(changed, members), changed.to_text()
            else:
                accepted += 1
                assert runs(changed, members), changed.to_text()
    assert accepted > 50 and refused > 200


def longest_path(program: Program, plan: Plan, prob: Problem, steps: int) -> list[dict[int, float]]:
    """By networkx: when each device has done its part of each of several steps, written out one after the other."""
    costs = Costs.of(program, plan, prob)
    label_of = program.waits.label_of
    graph = nx.DiGraph()
    graph.add_node("start")
    seconds: dict[object, float] = {"start": 0.0}
    tail: dict[object, object] = {}  # of each device and channel, the last node that occupies it
    arrival: dict[tuple, object] = {}
    ends = []
    for step in range(steps):
        needs: dict[tuple, list[tuple]] = defaultdict(list)
        for device, actions in program.actions.items():
            for i, a in enumerate(actions):
                node: object = (step, device, i)
                took = costs.seconds[label_of[program.waits.first[device] + i]] if a.kind not in RECEIVES else 0.0
                before = tail.get(device, "start")
                if a.kind in RECEIVES:
                    needs[device, a.kind[1], a.stage, a.microbatch].append(
                        (step, a.kind[1], a.peer_stage, a.stage, a.peer_device, device, a.lo)
                    )
                    continue
                if a.kind in SENDS:
                    channel = (a.kind[1], a.stage, a.peer_stage, device, a.peer_device)
                    seconds[node] = took
                    graph.add_edge(before, node)
                    graph.add_edge(tail.get(channel, "start"), node)
                    tail[channel] = node
                    late = prob.cluster.link(device, a.peer_device).latency_s if a.peer_device != device else 0.0
                    seconds["arrive", node] = late
                    graph.add_edge(node, ("arrive", node))
                    arrival[(step, *channel, a.lo)] = ("arrive", node)
                    continue
                if a.kind in ("R", "N"):
                    place = sum((b.kind, b.microbatch) == (a.kind, a.microbatch) for b in actions[:i])
                    meeting = ("meet", step, a.kind, -1 if a.kind == "N" else a.microbatch, place)
                    seconds[meeting] = took
                    graph.add_edge(before, meeting)
                    node = meeting
                else:
                    seconds[node] = took
                    graph.add_edge(before, node)
                tail[device] = node
        for device, actions in program.actions.items():
            for i, a in enumerate(actions):
                if a.kind in PASSES:
                    for key in needs[device, a.kind, a.stage, a.microbatch]:
                        graph.add_edge(arrival[key], (step, device, i))
        ends.append(dict(tail))
    when: dict[object, float] = {}
    for node in nx.topological_sort(graph):
        when[node] = max((when[p] for p in graph.predecessors(node)), default=0.0) + seconds[node]
    return [{device: when[tails[device]] for device in program.actions if device in tails} for tails in ends]


@pytest.mark.parametrize("seed", thinned(range(40), 3))
def test_times_are_a_longest_path(seed: int) -> None:
    program, plan, prob = random_case(seed)
    costs = Costs.of(program, plan, prob)
    times = LongestPath.of(program.waits, costs.seconds, costs.late).times()
    (ends,) = longest_path(program, plan, prob, 1)
    assert dict(zip(program.waits.devices, times.free_s, strict=False)) == pytest.approx(ends, rel=1e-12)


@pytest.mark.parametrize("seed", thinned(range(40), 3))
def test_a_step_is_what_a_further_one_adds(seed: int) -> None:
    """Against twelve steps written out: the last one adds the period, and so do the third and the fourth, nearly always."""
    program, plan, prob = random_case(seed)
    ends = [max(found.values()) for found in longest_path(program, plan, prob, 12)]
    found = simulate(program, plan, prob, record=False).metrics.iteration_s
    assert found == pytest.approx(ends[-1] - ends[-2], rel=1e-9)
    assert found <= ends[0] * (1 + 1e-12)
    assert found == pytest.approx(ends[3] - ends[2], rel=0.02)


def test_towers_of_unequal_length_overlap_successive_steps() -> None:
    """The period of unequal towers is shorter than a step from its first action to its last, and the fast path agrees."""
    shorter = 0
    for seed in range(80):
        rng = random.Random(seed)
        graph = random_dag(rng, rng.randint(3, 7))
        prob = Problem(graph=graph, cluster=NODES, cost=Updates(fixed_s=0.2), minibatch_size=8, global_norm=seed % 3 == 0)
        plan = make_plan(prob, "test", [(1 << op, rng.choice([1, 1, 2])) for op in range(graph.num_ops)], 2)
        program = lower(plan, graph, OneFOneB(), global_norm=prob.global_norm)
        costs = Costs.of(program, plan, prob)
        whole = max(LongestPath.of(program.waits, costs.seconds, costs.late).times().free_s[: plan.num_devices])
        metrics = simulate(program, plan, prob, record=False).metrics
        shorter += metrics.iteration_s < whole * (1 - 1e-6)
        warmups = [OneFOneB().warmup(plan, s, 4) for s in range(len(plan.stages))]
        if can_score(plan, warmups):
            fast = score(plan, prob, [w or 0 for w in warmups]).metrics
            assert fast.iteration_s == pytest.approx(metrics.iteration_s, rel=1e-12)
    assert shorter > 4


def test_a_file_that_cannot_run_is_named(tmp_path) -> None:
    program, plan, prob = random_case(0)
    path = tmp_path / "program.txt"
    path.write_text(program.to_text())
    groups = reduce_groups(plan, prob.graph)
    assert _checked(path, groups) == Program.from_text(program.to_text())
    device = next(d for d, own in program.actions.items() if any(a.kind == "B" for a in own))
    own = [a for a in program.actions[device] if a.kind != "F"]
    path.write_text(replace(program, actions={**program.actions, device: tuple(own)}).to_text())
    with pytest.raises(MalformedProgram, match=r"program\.txt"):
        _checked(path, groups)
