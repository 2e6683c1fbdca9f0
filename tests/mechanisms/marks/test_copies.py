"""Copies to the host: times against a walk over the program's text, and what is on the device at a time."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from gpp import GPipe, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.program.program import Program, reduce_groups
from gpp.schedules.base import AbstractSchedule
from gpp.simulate.crowded import shared_times
from gpp.simulate.longest_path import LongestPath
from gpp.simulate.recurrence import can_score
from gpp.simulate.simulator import Costs, simulate
from tests.oracle import events
from tests.program.test_waits import random_case
from tests.support.host import hosted, on_host
from tests.support.long import thinned

SAME = 1e-9


def costs_of(program: Program, plan: Plan, prob: Problem) -> events.Costs:
    """Seconds by the formulas of the documents, written down once more."""
    graph, cluster, bills = prob.graph, prob.cluster, plan.bills(prob)
    owner = {op: s for s, stage in enumerate(plan.stages) for op in stage.ops}
    total, groups = program.num_samples, reduce_groups(plan, graph)

    def message(kind: str, s: int, peer: int, d: int, there: int, samples: int) -> tuple[float, float]:
        made, read = (s, peer) if kind == "SF" else (peer, s)
        crossing = [t for t in graph.tensors if owner[t.producer] == made and read in {owner[c] for c in t.consumers}]
        size = samples * sum(t.bytes_per_sample for t in crossing if kind == "SF" or t.differentiable) + (not crossing)
        link = cluster.link(d, there) if d != there else None
        return (size / link.bandwidth_bytes_per_s, link.latency_s) if link else (0.0, 0.0)

    beside: dict[tuple[str, int], float] = defaultdict(float)
    copies: dict[int, int] = defaultdict(int)
    for device, own in program.actions.items():
        copies[device] = sum(a.kind == "O" for a in own)
        for a in own:
            if a.kind in ("SF", "SB") and a.peer_device != device and cluster.nodes[device] != cluster.nodes[a.peer_device]:
                size = message(a.kind, a.stage, a.peer_stage, device, a.peer_device, a.hi - a.lo)[0]
                size *= cluster.inter_node.bandwidth_bytes_per_s * cluster.inter_node.over_host
                beside["O", device] += size
                beside["P", a.peer_device] += size

    def own(kind: str, s: int, m: int) -> float:
        stage = plan.stages[s]
        samples = min(stage.microbatch_size, total - m * stage.microbatch_size)
        last = samples < stage.microbatch_size
        if kind in "FB":
            return bills[s].pass_s(last=last)[kind == "B"]
        if kind == "U":
            return bills[s].update_s
        moved = math.ceil(samples / len(stage.devices)) * sum(graph.ops[op].saved_bytes for op in marks_of(stage).offload)
        took = []
        for d in stage.devices:
            device = cluster.devices[d]
            size = moved + beside[kind, d] / copies[d]
            took.append(device.host_latency_s + size * device.host_sharers / (device.host_bandwidth_bytes_per_s or math.nan))
        return max(took)

    def summed(kind: str, group: int) -> float:
        if kind == "N":
            return cluster.allreduce_s(8, tuple(sorted(program.actions)))
        return cluster.allreduce_s(groups[group].num_bytes(graph), groups[group].devices)

    return events.Costs(own, message, summed)


def compare(program: Program, plan: Plan, prob: Problem) -> None:
    """The times of a step and of a further one by the simulator and by the walk; two copies of a stage at a time in both."""
    groups = reduce_groups(plan, prob.graph)
    members = {g: set(group.devices) for g, group in enumerate(groups)} | {-1: set(program.actions)}
    happened = events.walk(program.to_text(), members, costs_of(program, plan, prob), 12)
    waits, costs = program.waits, Costs.of(program, plan, prob)
    times, found = LongestPath.of(waits, costs.seconds, costs.late).times(), {}
    for device, own in program.actions.items():
        for node, a in enumerate(own, start=waits.first[device]):
            if a.kind in "FBOPU":
                found[device, a.kind, a.stage, a.microbatch] = (times.begin_s[node], times.end_s[node])
    for did in happened:
        if did.step == 0:
            assert found.pop(did[1:5]) == pytest.approx((did.begin_s, did.end_s), rel=SAME, abs=1e-12)
    assert not found
    ends = [max(did.end_s for did in happened if did.step == step) for step in range(12)]
    timeline = simulate(program, plan, prob)
    # The free of the last step differs from its end by a sum at most, which both have.
    assert timeline.metrics.iteration_s == pytest.approx(ends[-1] - ends[-2], rel=1e-6)
    most = events.most_resident(happened)
    assert most <= 2
    shown = [events.Did(0, e.device, e.kind, e.stage, e.microbatch, e.start_s, e.end_s) for e in timeline.events]
    assert events.most_resident(shown) <= 2
    assert sum(e.num_bytes for e in timeline.events if e.kind in "OP") == round(
        sum(round(costs.num_bytes[waits.label_of[n]]) for n in range(waits.num_nodes) if waits.action(n).kind in "OP")
    )


@pytest.mark.parametrize("seed", thinned(range(60), 3))
def test_times_are_those_of_a_walk_over_the_text_and_two_copies_are_on_a_device(seed: int) -> None:
    compare(*random_case(seed, on_host))


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=["1F1B", "GPipe"])
def test_the_last_micro_batch_may_be_smaller(schedule: AbstractSchedule) -> None:
    compare(*hosted(4, 11, 0.9, schedule, microbatch_size=3))


def test_a_second_fetch_waits_for_what_goes() -> None:
    """Copies there take 5 s and all else takes 1: the third has gone after 18 s, and only then a second one comes."""
    words = "F0 O0 F1 O1 F2 O2 P0 P1 B0 P2 B1 B2"
    program = Program.from_text("samples 3 minibatches 1\n" + " ".join(f"s0.{word}@d0" for word in words.split()) + "\n")
    waits = program.waits
    seconds = [5.0 if action.kind == "O" else 1.0 for _, action in waits.labels]
    times = LongestPath.of(waits, seconds, [0.0] * (waits.num_resources - 1)).times()
    begin = dict(zip(words.split(), times.begin_s, strict=True))
    assert (begin["F1"], begin["F2"], begin["O2"]) == (6, 12, 13)
    assert (begin["P0"], begin["P1"], begin["B0"], begin["P2"]) == (13, 18, 14, 19)


def test_the_random_plans_copy_and_wait_for_it() -> None:
    cases = [random_case(seed, on_host) for seed in range(60)]
    assert sum(any(a.kind == "O" for own in program.actions.values() for a in own) for program, _, _ in cases) > 40
    free = [simulate(*random_case(seed)).metrics.iteration_s for seed in range(60)]
    slower = [simulate(*case).metrics.iteration_s > alone * (1 + 1e-9) for case, alone in zip(cases, free, strict=True)]
    assert any(slower) and not all(slower)
    assert any(prob.cluster.inter_node.over_host for _, _, prob in cases)


def test_copies_that_fit_beside_a_pass_cost_nothing_and_longer_ones_what_they_are_longer() -> None:
    """A forward takes 1 s and a backward 2: a copy out has both until the next one, a copy back has the forward."""
    step = {s: simulate(*hosted(4, 32, s)).metrics.iteration_s for s in (0.01, 0.9, 4.0)}
    assert step[0.01] == pytest.approx((32 + 3) * 3)
    assert step[0.9] == pytest.approx(step[0.01])
    # Behind each backward, a fetch, and only then the next one: 4 + 2 seconds a micro-batch in place of 3.
    assert step[4.0] > step[0.01] + (32 - 4) * 2.9


def test_a_plan_that_copies_is_simulated_and_not_scored() -> None:
    _, plan, _ = hosted(4, 8, 0.5)
    warmups: list[int | None] = [OneFOneB().warmup(plan, s, 8) for s in range(4)]
    assert not can_score(plan, warmups)
    assert can_score(replace(plan, stages=tuple(marked(s, offload=()) for s in plan.stages)), warmups)


def test_a_device_without_a_host_is_refused() -> None:
    program, plan, prob = hosted(4, 8, 0.5)
    devices = tuple(replace(d, host_bandwidth_bytes_per_s=None) for d in prob.cluster.devices)
    with pytest.raises(InvalidConfig, match=r"host_bandwidth_bytes_per_s.*no link to it.*give its bandwidth"):
        simulate(program, plan, replace(prob, cluster=replace(prob.cluster, devices=devices)))


def test_where_backwards_follow_each_other_a_fetch_runs_beside_the_one_before() -> None:
    """Of all forwards first: beside the first fetch and the last two, each is hidden, and every forward waits for a copy out."""
    count, took = 32, 0.5
    step = simulate(*hosted(3, count, took, GPipe())).metrics.iteration_s
    free = simulate(*hosted(3, count, 0.001, GPipe())).metrics.iteration_s
    assert step < free + count * took + 2 * took


def test_devices_with_a_processor_each_run_as_if_they_shared_none() -> None:
    for seed in range(20):
        program, plan, prob = random_case(seed, on_host)
        waits, costs = program.waits, Costs.of(program, plan, prob)
        shared, _ = shared_times(waits, costs.seconds, costs.late, len(waits.devices), repeats=1)
        times = LongestPath.of(waits, costs.seconds, costs.late).times()
        assert shared.begin_s == pytest.approx(times.begin_s) and shared.end_s == pytest.approx(times.end_s), seed
