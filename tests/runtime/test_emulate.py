"""Emulated devices: their virtual clock is the simulator's time, their real one is close to it; both through the real runtime."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import SGD, Emulate, Even, Flush, GPipe, OneFOneB, Plan, Split1F1B, Strategy, ZeroBubbleH1, ZeroBubbleH2
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.marks.stage import marked, marks_of
from gpp.plan.build import make_plan
from gpp.program.program import reduce_groups
from gpp.program.waits import EVERYONE
from gpp.runtime.emulator.pace import Pace
from gpp.runtime.emulator.worker import Agree, EmulatedWorker
from gpp.runtime.job import Job, assemble
from gpp.schedules.base import AbstractSchedule
from gpp.timeline import Timeline
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.cli import run
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.graphs import in_halves
from tests.support.host import on_host
from tests.support.long import thinned
from tests.support.problems import random_partition, random_problem, split_plan, split_problem, uneven


def frozen(graph: OpGraph, count: int, rng: random.Random) -> OpGraph:
    """The first `count` operators train nothing and get no gradients, and some further tensors carry none."""
    none = {"backward_flops": 0.0, "saved_bytes": 0.0, "params": ()}
    ops = tuple(replace(op, **none) if i < count else op for i, op in enumerate(graph.ops))
    tensors = tuple(
        replace(t, differentiable=t.producer >= count and min(t.consumers) >= count and rng.random() < 0.9) for t in graph.tensors
    )
    used = {name for op in ops for name in op.params}
    return replace(graph, ops=ops, tensors=tensors, params=tuple(p for p in graph.params if p.name in used))


def random_plan(seed: int) -> tuple[Problem, Plan, AbstractSchedule]:
    """Stages on unequal devices with replicas, of unequal micro-batches; some recompute, copy to the host, or share a device."""
    rng = random.Random(seed)
    schedule: AbstractSchedule = rng.choice([OneFOneB(), GPipe()])
    # Every third one splits its backwards; among them are shared devices, copies and stages that train nothing.
    schedule = [Split1F1B(), ZeroBubbleH1(), ZeroBubbleH2()][seed // 3 % 3] if seed % 3 == 0 else schedule
    problem = replace(random_problem(seed, max_ops=12, max_devices=6), regime=Regime(holds=schedule.holds))
    problem = uneven(problem, seed) if rng.random() < 0.6 else problem
    graph = frozen(problem.graph, rng.choice([0, 0, problem.graph.num_ops // 2]), rng)
    graph = in_halves(graph) if schedule.holds.parts else graph
    problem = replace(problem, graph=graph, global_norm=rng.random() < 0.3)
    devices = problem.cluster.num_devices
    count = rng.randint(1, devices)
    parts = random_partition(problem.graph, count, rng)
    sizes = [rng.choice([2, 3, 4, 5]) for _ in parts]
    extra = sorted(rng.choice([0, 0, devices - count]) * (p == count - 1) for p in range(count))
    plan = make_plan(
        problem,
        "random",
        [(mask, 1 + min(more, size - 1)) for mask, more, size in zip(parts, extra, sizes, strict=True)],
        sizes,
        k=1 if schedule.holds.parts else rng.choice([1, 1, 2]),
        chain=rng.random() < 0.3,
    )
    trains = [plan.runs_backward(s, problem.graph) for s in range(count)]
    stages = [marked(s, recompute=s.ops) if t and rng.random() < 0.2 else s for s, t in zip(plan.stages, trains, strict=True)]
    if count > 1 and rng.random() < 0.3:
        stages[-1] = replace(stages[-1], devices=stages[0].devices[: len(stages[-1].devices)])
    plan = replace(plan, stages=tuple(stages))
    if seed % 2:
        problem, plan = on_host(rng, problem, plan)
    return problem, plan, schedule


def job_of(
    problem: Problem, plan: Plan, schedule: AbstractSchedule, weights: AbstractWeights | None = None
) -> tuple[Job, Timeline]:
    """A job without a model, and its prediction."""
    strategy = Strategy(name="test", planner=Even(), schedule=schedule, weights=weights or Flush())
    problem = strategy.posed(problem)
    job = assemble(
        Captured(name="none", nodes=(), inputs=(), results={}, graph=problem.graph),
        problem,
        plan,
        strategy,
        optimizer=SGD(lr=0.1, momentum=0.9, clip_norm=1.0 if problem.global_norm else None),
        data=Synthetic(num_samples=1, num_test_samples=1),
        model=None,
        steps=3,
        dtype="float32",
        seed=0,
        train_samples=0,
        **Emulate(budget_s=1.0).worker_settings,
    )
    return job, strategy.predict(plan, problem)


def workers_of(job: Job) -> list[EmulatedWorker]:
    devices = sorted(job.plan.stages_of_device)
    network = FakeNetwork(reduce_groups(job.plan, job.graph), len(devices))

    def agree(transport: FakeTransport, place: int) -> Agree:
        def largest(values: list[float]) -> list[float]:
            table = torch.zeros(len(devices), len(values), dtype=torch.float64)
            table[place] = torch.tensor(values, dtype=torch.float64)
            transport.reduce(EVERYONE, table)
            return table.max(0).values.tolist()

        return largest

    transports = [FakeTransport(network, device) for device in devices]
    return [
        EmulatedWorker(job, device_id=device, transport=transport, agree=agree(transport, place))
        for place, (device, transport) in enumerate(zip(devices, transports, strict=True))
    ]


def rehearse(workers: list[EmulatedWorker]) -> tuple[list[dict[str, Any]], float]:
    """The last record of every worker, and the period that all of them found."""
    calls: list[Callable[[], Any]] = [w.rehearse for w in workers]
    found = inprocess.in_threads(calls)
    assert len({period for _, period in found}) == 1
    return [record for record, _ in found], found[0][1]


def step(workers: list[EmulatedWorker], time_scale: float) -> tuple[list[dict[str, Any]], float]:
    """The records of a step, and when the last worker began it."""

    def call(worker: EmulatedWorker) -> tuple[dict[str, Any], float]:
        start = worker.begin(time_scale)
        return worker.step(), start

    found = inprocess.in_threads([lambda w=w: call(w) for w in workers])
    return [record for record, _ in found], found[0][1]


@pytest.mark.parametrize("seed", thinned(range(15)))
def test_the_virtual_clock_is_the_simulators_time(seed: int, tmp_path: Path) -> None:
    job, predicted = job_of(*random_plan(seed))
    job.save(tmp_path)
    workers = workers_of(Job.load(tmp_path))
    done, period = rehearse(workers)
    assert period == pytest.approx(predicted.metrics.iteration_s, rel=1e-9)
    # Each device's own end, too: the later of what it did last. The prediction begins with the step's first action.
    ends = {w.device_id: record["virtual_s"] for w, record in zip(workers, done, strict=True)}
    last = {d: max(e.end_s for e in predicted.events if e.device == d and e.kind in "FBIWRNU") for d in ends}
    zero = max(ends.values()) - max(last.values())
    assert {d: end - zero for d, end in ends.items()} == pytest.approx(last, rel=1e-11)
    kinds = [(e.kind, e.stage, e.microbatch) for record in done for e in record["events"] if e.kind in "FBIWOPRNU"]
    assert sorted(kinds) == sorted((e.kind, e.stage, e.microbatch) for e in predicted.events if e.kind in "FBIWOPRNU")
    peaks = {w.device_id: w.held.peak_bytes({s: job.costs[s].memory for s in w.runners}) for w in workers}
    assert peaks == pytest.approx(predicted.metrics.peak_memory_bytes, abs=1)
    sent = sum(e.num_bytes for record in done for e in record["events"] if e.kind in ("SF", "SB", "R"))
    assert sent == pytest.approx(predicted.metrics.communication_bytes, rel=1e-3, abs=16 * len(workers))


def test_the_random_plans_cover_what_can_be_planned() -> None:
    found = [random_plan(seed)[:2] for seed in range(24)]
    plans = [plan for _, plan in found]
    assert any(len(stage.devices) > 1 for plan in plans for stage in plan.stages)
    assert any(len({stage.microbatch_size for stage in plan.stages}) > 1 for plan in plans)
    assert any(plan.shares_devices for plan in plans)
    assert any(marks_of(stage).recompute for plan in plans for stage in plan.stages)
    assert any(marks_of(stage).offload for plan in plans for stage in plan.stages)
    assert any(not problem.cluster.homogeneous for problem, _ in found)
    assert any(problem.global_norm for problem, _ in found)
    assert any(plan.minibatch_size % stage.microbatch_size for plan in plans for stage in plan.stages)
    assert any(not plan.runs_backward(s, problem.graph) for problem, plan in found for s in range(len(plan.stages)))
    assert any(not t.differentiable for problem, _ in found for t in problem.graph.tensors)
    halves = [(problem, plan) for problem, plan, schedule in map(random_plan, range(24)) if schedule.holds.parts]
    assert any(plan.shares_devices for _, plan in halves) and any(
        marks_of(stage).offload for _, plan in halves for stage in plan.stages
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_tensor_parallel_stages_are_only_times(replicas: int) -> None:
    problem = split_problem(2 + 2 * replicas)
    job, predicted = job_of(problem, split_plan(problem, replicas), OneFOneB())
    _, period = rehearse(workers_of(job))
    assert period == pytest.approx(predicted.metrics.iteration_s, rel=1e-9)


def test_real_time_follows_the_virtual_one_and_never_runs_ahead() -> None:
    job, predicted = job_of(*random_plan(3))
    workers = workers_of(job)
    scale = 0.5 / predicted.metrics.iteration_s
    expected = {(e.device, e.kind, e.stage, e.microbatch): e.start_s for e in predicted.events if e.kind in "FB"}
    rehearse(workers)
    ratios = []
    for _ in range(3):
        done, start = step(workers, scale)
        ratios.append((max(r["end"] for r in done) - start) / scale / predicted.metrics.iteration_s)
        begun = min(r["start"] for r in done)
        for record in done:
            for e in record["events"]:
                if e.kind in "FB":
                    assert (e.start_s - begun) / scale >= expected[e.device, e.kind, e.stage, e.microbatch] * (1 - 1e-9)
    # A busy machine wakes sleepers late, but not always.
    assert 1.0 <= min(ratios) < 1.5


def test_the_pace_makes_the_runtime_small_within_its_budget() -> None:
    pace = Pace(budget_s=60.0, overhead=0.02)
    assert pace.choose(0.5, 0.1, 2) == pytest.approx(10.0)  # 0.1 s is 2 % of 5 s
    assert pace.choose(0.5, 10.0, 2) == pytest.approx(60.0)  # two steps of 30 s
    assert pace.choose(20.0, 0.1, 2) == pytest.approx(0.25)  # faster than real
    assert pace.choose(0.5, 0.001, 2) == pytest.approx(2.0 / 0.5)  # no shorter than 2 s
    assert replace(pace, time_scale=3.0).choose(0.5, 0.1, 2) == 3.0
    assert math.isfinite(pace.choose(0.0, 0.1, 2))


SMALL = ["model=mmt_small", "model.num_branches=2", "model.num_layers=2"]
COMMON = [*SMALL, "cluster=mixed_2x4", "cost=analytical", "engine=emulate", "logger=none", "minibatch_size=32"]


@pytest.mark.dist
def test_eight_unequal_devices_on_this_machine(tmp_path: Path) -> None:
    done = run(tmp_path, *COMMON, "engine.budget_s=1", "steps=3")
    assert done.code == 0, done.out
    result = done.result
    assert result["engine"] == "emulate" and result["loss"] == []
    emulation, predicted, measured = result["emulation"], result["predicted"], result["measured"]
    assert emulation["virtual_iteration_s"] == pytest.approx(predicted["iteration_s"], rel=1e-9)
    assert len(emulation["step_s"]) == 2
    # The runtime comes on top of the emulated times; how much it is depends on what else this machine does.
    assert result["prediction_error"] >= 0 and emulation["unpaced_s"] > 0
    assert measured["peak_memory_bytes"] == predicted["peak_memory_bytes"]
    assert measured["communication_bytes"] == pytest.approx(predicted["communication_bytes"], rel=1e-3)
    assert not (tmp_path / "job" / "weights.safetensors").exists() and not (tmp_path / "checkpoints").exists()
    timelines = json.loads((tmp_path / "timeline.json").read_text())
    assert {e[0] for e in timelines["measured"]["events"]} == {int(d) for d in predicted["peak_memory_bytes"]}
    assert "virtual" in done.out
