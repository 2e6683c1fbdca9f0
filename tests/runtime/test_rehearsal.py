"""Rehearsals: what they measure, and what follows from it."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import gpp.app.in_place as in_place
from gpp import Analytical, Distributed, GraphPipe, OneFOneB, Plan, Progress, Strategy, local
from gpp.cost.models.profiled import GraphProfile, Profiled, cpu_setting
from gpp.cost.overheads import Overheads
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import WorkerFailed
from gpp.graph.op_graph import Op, OpGraph, Param, Tensor
from gpp.mechanisms.serving.course import Arrivals, Requests
from gpp.plan.build import make_plan
from gpp.runtime.rehearsal.machine import CHAINS, MachineCosts, TwoStageChain, _job, fit, known
from gpp.runtime.rehearsal.rehearse import QUIET, DeviceTimes, Rehearsals, _others, _times, message_factor, short, stage_times
from gpp.runtime.worker.parent import worker_environment
from tests.support import cli
from tests.support.call import call
from tests.support.forked import programs_forked

SETTING = cpu_setting(1)
TRUE = MachineCosts(
    setting=SETTING,
    fixed=Overheads(
        forward_s=8e-5,
        backward_s=8e-5,
        message_s=3e-5,
        send_s_per_byte=2e-10,
        receive_s_per_byte=5e-10,
        send_s_per_tensor=1.2e-5,
        receive_s_per_tensor=7e-6,
        step_s=4e-4,
    ),
    latency_s=9e-5,
    sum_s=3e-4,
    sum_s_per_byte=1e-9,
)


def chain(chain: TwoStageChain) -> tuple[DeviceTimes, DeviceTimes]:
    """Both workers of a chain of two stages on a machine with the constants `TRUE`, by hand."""
    width, size, count, tensors = chain
    size_bytes = 4 * width * size * tensors
    send_s = TRUE.fixed.message_s + size_bytes * TRUE.fixed.send_s_per_byte + (tensors - 1) * TRUE.fixed.send_s_per_tensor
    way_s = TRUE.latency_s + size_bytes * TRUE.fixed.receive_s_per_byte
    passes = 2 * count
    forward_s, backward_s, update_s = 1e-4 + 1e-9 * width * width * size, 2e-4 + 2e-9 * width * width * size, 1e-4
    rest_s = TRUE.fixed.step_s + passes * TRUE.fixed.forward_s + count * (tensors - 1) * TRUE.fixed.receive_s_per_tensor
    other_s = forward_s + backward_s + send_s + 2 * TRUE.fixed.forward_s
    waited_s = 2 * way_s + other_s if count == 1 else 0.5e-3
    return tuple(  # pyright: ignore[reportReturnType]
        DeviceTimes(
            device=device,
            forward_s={device: forward_s},
            backward_s={device: backward_s},
            update_s=update_s,
            sends=((size_bytes, send_s),),
            passes=passes,
            rest_s=rest_s,
            waited_s=waited_s,
            step_s=1.0,
        )
        for device in (0, 1)
    )


def test_constants_of_a_machine_are_found_again() -> None:
    sums = [(num_bytes, TRUE.sum_s + num_bytes * TRUE.sum_s_per_byte) for num_bytes in (1.7e4, 4.2e6)]
    found = fit({key: chain(key) for key in CHAINS}, sums, SETTING)
    for one, true in ((found, TRUE), (found.fixed, TRUE.fixed)):
        for name in (field.name for field in dataclasses.fields(true) if field.name not in ("setting", "fixed")):
            assert getattr(one, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    cluster = found.cluster(local(num_devices=2))
    assert cluster.allreduce_s(1e6, (0, 1)) == pytest.approx(TRUE.sum_s + 1e6 * TRUE.sum_s_per_byte)
    assert cluster.link(0, 1).transfer_s(1e6) == pytest.approx(TRUE.latency_s, rel=0.02)


def branches(num: int) -> OpGraph:
    """A source, `num` branches of three operators each, and a join."""
    ops = [Op(name=f"o{i}", forward_flops=1, backward_flops=2, saved_bytes=8, params=(f"w{i}",)) for i in range(3 * num + 2)]
    ends, tensors = [], []
    for branch in range(num):
        own = [0, *(1 + 3 * branch + k for k in range(3))]
        tensors += [Tensor(name=f"t{a}_{b}", producer=a, consumers=(b,), bytes_per_sample=8) for a, b in pairwise(own)]
        ends.append(own[-1])
    join = 3 * num + 1
    tensors += [Tensor(name=f"t{end}", producer=end, consumers=(join,), bytes_per_sample=8) for end in ends]
    params = tuple(Param(name=f"w{i}", num_bytes=64) for i in range(len(ops)))
    return OpGraph(name="branches", ops=tuple(ops), tensors=tuple(tensors), params=params)


def record(device: int, *, busy: float, slower: float = 1.25) -> dict[str, Any]:
    """What a worker of a chain writes down in four steps of 10 ms: a forward of 1 ms, a backward of 2 ms and a message of 0.1 ms of
    its thread, which take `slower` times as long by the wall's clock; `busy` seconds a step were computed on the whole machine."""
    kinds = [("F", 1e-3, 0), ("SF", 1e-4, 512), ("B", 2e-3, 0)]
    events, walls, now = [], [], 0.0
    for kind, seconds, num_bytes in kinds:
        events.append([device, kind, device, 0, now, now + seconds, num_bytes])
        walls.append(seconds * slower)
        now += seconds
    ends = [(n * 4e-3, n * 1e-2, n * 5e-3, n * busy) for n in range(4)]
    return {"device": device, "steps": [{"events": events, "waited_s": 0.0}] * 4, "walls": [walls] * 4, "ends": ends}


def test_passes_count_by_the_wall_where_nothing_else_runs() -> None:
    cores = os.cpu_count() or 1
    for spare, quiet in ((0.2 * QUIET, True), (2 * QUIET, False)):
        records = [record(device, busy=1e-2 + spare * 1e-2 * cores) for device in (0, 1)]
        share = _others(records)
        assert share == pytest.approx(spare)
        devices = tuple(_times(found, share, quiet=share <= QUIET) for found in records)
        assert devices[0].forward_s == {0: pytest.approx(1e-3)} and devices[0].rest_s == pytest.approx(4e-3 - 3.1e-3)
        assert (devices[1].at_work is not None) == quiet
        factor = 1.25 if quiet else 1.0
        problem = Problem(graph=branches(1), cluster=local(num_devices=2), cost=Analytical(), minibatch_size=2, microbatch_size=2)
        half = problem.graph.num_ops // 2
        parts = [((1 << half) - 1, 1), (problem.graph.all_mask & ~((1 << half) - 1), 1)]
        job: Any = Job(problem, make_plan(problem, "by hand", parts, 2))
        for stage in stage_times(job, devices, (1e-4, 2e-4)):
            assert stage.forward_s == pytest.approx(1e-3 * factor - 1e-4)
            assert stage.backward_s == pytest.approx(2e-3 * factor - 2e-4)
        # Both sent for 0.125 ms where 0.2 ms were predicted.
        assert message_factor(devices, 2e-4) == (pytest.approx(1.25) if quiet else None)


class Fake:
    """Rehearsals on a machine whose operators take `truth`, not what they take alone."""

    truth: np.ndarray
    plans: list[Plan]
    rates: list[float | None]
    error: str | None = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        Fake.plans, Fake.rates = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, job: Any, weights: Any, *, predicted_s: float) -> tuple[DeviceTimes, ...]:
        if Fake.error:
            raise WorkerFailed(0, Fake.error)
        Fake.plans.append(job.plan)
        out = []
        for device, stages in job.plan.stages_of_device.items():
            took = {s: float(Fake.truth[list(job.plan.stages[s].ops)].sum()) for s in stages}
            out.append(
                DeviceTimes(
                    device=device,
                    forward_s=took,
                    backward_s={s: 2 * seconds for s, seconds in took.items()},
                    update_s=0.0,
                    sends=(),
                    passes=1,
                    rest_s=0.0,
                    waited_s=0.0,
                    step_s=1.0,
                )
            )
        return tuple(out)


@pytest.fixture
def posed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    graph = branches(3)
    rows = tuple((1e-3,) for _ in graph.ops)
    profile = GraphProfile(
        graph_fingerprint=graph.fingerprint,
        setting=SETTING,
        sample_counts=(2,),
        forward_s=rows,
        backward_s=rows,
        update_s_per_byte=0.0,
        move_s_per_byte=0.0,
    )
    cost = Profiled(cache_dir=str(tmp_path), profiles=(profile,), rehearsals=6)
    Fake.truth = np.array([1e-3] * graph.num_ops)
    Fake.truth[1:4] = 4e-3  # the first branch is slower in place
    Fake.error = None
    monkeypatch.setattr(in_place, "Rehearsals", Fake)
    monkeypatch.setattr(in_place, "measure", lambda *_, **__: TRUE)
    monkeypatch.setattr(in_place, "short", lambda job, steps, rate: Fake.rates.append(rate) or job)
    return Problem(graph=graph, cluster=local(num_devices=2), cost=cost, minibatch_size=16, microbatch_size=2)


STRATEGY = Strategy(name="graphpipe", planner=GraphPipe(replication=False), schedule=OneFOneB())


class Job:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.plan, self.graph = plan, problem.graph


def settled(problem: Problem, plan: Plan, **more: Any) -> tuple[Problem, Plan, list[str]]:
    said: list[str] = []
    words: dict[str, Any] = {
        "given": False,
        "started": None,
        "job_of": Job,
        "weights": dict,
        "progress": Progress(say=lambda _: None, warn=said.append),
        **more,
    }
    return *in_place.settle(problem, plan, STRATEGY, Distributed(), **words), said


def test_the_plan_is_the_one_for_times_in_place(posed: Problem) -> None:
    problem, plan, said = settled(posed, STRATEGY.plan(posed))
    assert not said
    for stage in plan.stages:
        took = problem.op_times(2, stage.devices[0])
        assert took.forward_s[list(stage.ops)].sum() == pytest.approx(Fake.truth[list(stage.ops)].sum(), rel=0.05)

    # Among the plans that were looked at it is the fastest by the truth, and the slow branch has moved the cut.
    def work(own):
        return max(sum(Fake.truth[op] for s in stages for op in own.stages[s].ops) for stages in own.stages_of_device.values())

    assert work(plan) == min(map(work, Fake.plans)) < work(Fake.plans[0])
    assert known(next((Path(posed.cost.cache_dir) / "machines").glob("*.json"))) == TRUE  # pyright: ignore[reportAttributeAccessIssue]


def test_what_was_timed_is_not_timed_again(posed: Problem) -> None:
    problem, plan, _ = settled(posed, STRATEGY.plan(posed))
    cost = problem.cost
    assert isinstance(cost, Profiled) and cost.load(problem.graph, SETTING) == cost.profile_of(
        problem.graph, problem.cluster.devices[0]
    )
    Fake.plans = []
    assert settled(problem, plan)[:2] == (problem, plan) and not Fake.plans


def test_a_plan_of_the_users_own_stays(posed: Problem) -> None:
    alone = STRATEGY.plan(posed)
    problem, plan, _ = settled(posed, alone, given=True)
    assert plan is alone and len(Fake.plans) == 1
    assert STRATEGY.predict(plan, problem).metrics.iteration_s > STRATEGY.predict(plan, posed).metrics.iteration_s


def test_requests_at_a_rate_are_timed_apart_from_those_that_wait(posed: Problem) -> None:
    """A worker that is never idle has warm caches; a rate below `LEAST_RATE` would take too long."""
    busy, _, _ = settled(posed, STRATEGY.plan(posed), given=True)
    assert Fake.rates == [None]

    def at(rate: float) -> tuple[Problem, GraphProfile]:
        paced = in_place.here(replace(busy, regime=Regime(course=Requests(buffers=2, arrivals=Arrivals(rate=rate)))), Distributed())
        profile = paced.cost.profile_of(paced.graph, paced.cluster.devices[0])  # pyright: ignore[reportAttributeAccessIssue]
        return paced, profile

    for rate, expected in ((40.0, 40.0), (0.5, in_place.LEAST_RATE)):
        paced, profile = at(rate)
        assert profile.setting == replace(SETTING, rate=expected) and not profile.in_place
        Fake.plans = []
        settled(replace(paced, regime=busy.regime), STRATEGY.plan(busy), given=True)
        assert len(Fake.plans) == 1 and Fake.rates == [expected]
        assert at(rate)[1].in_place
    cost, device = posed.cost, busy.cluster.devices[0]
    assert isinstance(cost, Profiled) and cost.load(busy.graph, SETTING) == busy.cost.profile_of(busy.graph, device)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rehearsal_that_fails_is_told_and_times_alone_stay(posed: Problem) -> None:
    Fake.error = "out of memory"
    problem, plan, said = settled(posed, STRATEGY.plan(posed))
    assert "out of memory" in said[0] and problem.cost == posed.cost
    assert plan.stages == STRATEGY.plan(problem).stages


@pytest.mark.dist
def test_real_workers_rehearse() -> None:
    call(__name__, "rehearse")


def rehearse() -> None:
    """Two jobs, one after the other in the same process: what a worker writes down is read as seconds of its own stage."""
    chain = TwoStageChain(16, 8, 2)
    job, weights = _job(chain, replicas=1, shared_memory=True)
    with programs_forked(), Rehearsals(worker_environment(1)) as rehearsals:
        for steps in (4, 6):
            devices = rehearsals.run(short(job, steps), weights, predicted_s=0.05)
            assert [times.device for times in devices] == [0, 1]
            for times in devices:
                assert times.forward_s.keys() == times.backward_s.keys() == {times.device}
                assert times.passes == 2 * chain.microbatches and times.update_s > 0
                assert [num_bytes for num_bytes, _ in times.sends] == [chain.num_bytes]
                assert 0 < times.forward_s[times.device] < times.step_s and 0 <= times.waited_s < times.step_s


@pytest.mark.long
@pytest.mark.dist
def test_a_training_takes_what_real_workers_have_rehearsed(tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "model.width=32",
        "model.num_blocks=2",
        "cost.budget_s=0.3",
        "cluster.num_devices=2",
        "microbatch_size=16",
        "logger=none",
        "final_weights=false",
        "baselines_s=0",
    ]
    env = {"GPP_REHEARSALS": "2", "GPP_CACHE": str(tmp_path / "cache")}
    profiled = cli.run(tmp_path / "profile", *words, "mode=profile", **env)
    assert profiled.code == 0, profiled.out
    assert "in place inside" in profiled.out and "until it is there" in profiled.out
    stored = next(path for path in (tmp_path / "cache" / "profiles").glob("*.json"))
    before = stored.read_text()
    assert '"in_place": []' not in before
    trained = cli.run(tmp_path / "train", *words, "steps=3", **env)
    assert trained.code == 0 and stored.read_text() == before, trained.out
    assert trained.result["predicted"]["iteration_s"] == profiled.result["predicted"]["iteration_s"]
