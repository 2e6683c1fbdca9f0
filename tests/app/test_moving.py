"""Which plan a training goes on with, and whether the switch pays."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpp import OneFOneB, Plan, Sequential, Strategy
from gpp.app import replanning
from gpp.app.moving import better, changes, check_movable, check_unreplanned, transfer_s
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.replan import Moved, Replaced, Replan, Switch, at_speeds
from gpp.report.run.page import replaced_table, run_report
from gpp.report.run.record import RunRecord
from gpp.runtime.engine import Progress, Taken
from gpp.timeline import Outcome
from tests.app import test_replanning
from tests.app.test_replanning import Settings
from tests.support import graphs

STRATEGY = Strategy(name="test", planner=Sequential(replication=False), schedule=OneFOneB(), replan=Replan(every=4))


def cut(problem: Problem, ends: tuple[int, ...]) -> Plan:
    """A chain of the operators before each end, one device each."""
    parts = [(sum(1 << op for op in range(i, j)), 1) for i, j in itertools.pairwise((0, *ends, problem.graph.num_ops))]
    return make_plan(STRATEGY.posed(problem), "test", parts, 2, ordered=True)


def posed(ops: int, devices: int) -> Problem:
    return replace(graphs.problem(graphs.chain(ops), devices, 16, microbatch_size=2), cluster=graphs.cluster(devices))


@pytest.mark.parametrize("slow", [{0: 2.0}, {1: 2.0}, {2: 3.0}, {0: 1.5, 2: 1.5}, {}])
def test_moves_find_the_best_cut_for_devices_that_are_slow(slow: dict[int, float]) -> None:
    problem = posed(12, 3)
    start, problem = cut(problem, (4, 8)), replace(problem, cluster=at_speeds(problem.cluster, slow))

    def step_s(plan: Plan) -> float:
        return STRATEGY.predict(plan, problem, record=False).metrics.iteration_s

    best = min(step_s(cut(problem, ends)) for ends in itertools.combinations(range(1, 12), 2))
    found = better(STRATEGY, start, problem)
    if not slow:
        assert found is None and best == step_s(start)
        return
    assert found is not None and found.after_s == pytest.approx(best) and found.before_s == step_s(start) > found.after_s
    assert step_s(found.plan) == found.after_s and found.plan.devices == start.devices
    moved = changes(start, found.plan)
    assert moved and all(abs(one.source - one.destination) == 1 for one in moved)


def test_a_graph_of_stages_stays_one_whose_stages_wait_for_nobody_behind() -> None:
    graph = graphs.two_towers(6)
    problem = replace(graphs.problem(graph, 2, 16, microbatch_size=2), cluster=graphs.cluster(2))
    plan = Strategy(name="test", planner=Sequential(replication=False), schedule=OneFOneB()).plan(problem)
    found = better(STRATEGY, plan, replace(problem, cluster=at_speeds(problem.cluster, {1: 2.0})))
    assert found is not None
    found.plan.validate(STRATEGY.posed(problem))


def test_whoever_holds_the_plan_gets_no_other() -> None:
    check_unreplanned(replace(STRATEGY, replan=Replan()))
    with pytest.raises(InvalidConfig, match=r"strategy.replan.every=4: is for run.py.*Fix: leave replan out"):
        check_unreplanned(STRATEGY)


def test_a_report_has_a_row_for_each_switch() -> None:
    switch = Switch(moved=(Moved(operators=3, source=1, destination=0),), bytes=1_500_000, predicted_bytes=1_400_000, pause_s=0.25,
                    predicted_pause_s=0.2, predicted_step_s=(1.0, 0.5), samples_per_s=(100.0, None))  # fmt: skip
    found = Replaced(first=41, slow={1: 2.0}, stages=2, devices=(0, 1), switch=switch)
    table = replaced_table(RunRecord().knowing(replaced=(found,)))
    assert table is not None and len(table.rows[0]) == len(table.columns)
    words = " | ".join(str(cell) for cell in table.rows[0])
    assert (
        words.startswith("41 | device 1 2.00 times as long as planned | 3 operators from stage 1 to 0 | 1.5")
        and "250 ms" in words
        and words.endswith("2.00×")
    )
    assert replaced_table(RunRecord()) is None and "Plans that were replaced" in run_report(RunRecord().knowing(replaced=(found,)))


def test_what_links_take() -> None:
    cluster = posed(4, 3).cluster
    link = cluster.link(0, 1)
    one = link.latency_s + 1e6 / link.bandwidth_bytes_per_s
    assert (
        transfer_s(cluster, {(0, 1): 1e6}) == pytest.approx(one) == transfer_s(cluster, {(0, 1): 1e6, (2, 0): 0.0}) - link.latency_s
    )
    assert transfer_s(cluster, {}) == 0.0


def test_split_operators_and_blocks_do_not_move() -> None:
    plan = cut(posed(4, 2), (2,))
    check_movable(plan, SimpleNamespace(nodes=[SimpleNamespace(kind="call")]), 5)  # type: ignore[arg-type]
    split = replace(plan, stages=(replace(plan.stages[0], devices=(0, 2)).having(TensorParallel(degree=2)), plan.stages[1]))
    with pytest.raises(InvalidConfig, match=r"strategy.replan.every=5.*stage 0 splits.*Fix: .*tensor_parallel=false"):
        check_movable(split, SimpleNamespace(nodes=[]), 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"block mine may hold others"):
        check_movable(plan, SimpleNamespace(nodes=[SimpleNamespace(kind="block", target="mine")]), 5)  # type: ignore[arg-type]


class Job(test_replanning.Job):
    def save(self, run_dir: Path) -> None:
        (run_dir / "saved").write_text(str(len(self.plan.stages[0].ops)))


class Slowing:
    """An engine whose second device changes its speed; it takes what is announced at the next multiple of 10.

    Args:
        factor: step -> how many times as long the second device takes.
        dear: how many times as long the first one takes once it has operators of the second.
        pause_s: of every switch.
    """

    def __init__(self, factor: Callable[[int], float], dear: float, pause_s: float, announced: list[Job]) -> None:
        self.factor, self.dear, self.pause_s, self.announced, self.taken = factor, dear, pause_s, announced, 0

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        ops = [len(stage.ops) for stage in job.plan.stages]
        for step in range(job.settings.steps):
            progress.on_pass(0, ops[0] * 48.0 * (self.dear if ops[0] > 6 else 1.0))
            progress.on_pass(1, ops[1] * 48.0 * self.factor(step))
            progress.on_step(step + 1, None, 16 / 600.0 if step else None)
            if self.announced and (step + 1) % 10 == 0:
                later = self.announced.pop()
                ops = [len(stage.ops) for stage in later.plan.stages]
                taken: Any = replace(later, settings=replace(job.settings, first_step=step + 1))
                progress.on_taken(Taken(self.taken, taken, self.pause_s, 640))
                self.taken += 1
        return Outcome()


def half(first: int, end: int = 1000) -> Callable[[int], float]:
    return lambda step: 2.0 if first <= step < end else 1.0


@dataclass(frozen=True)
class Trained:
    """A training, and the switches that are right: the first step under each plan, and the first stage's operators by then."""

    factor: Callable[[int], float]
    firsts: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()
    unpaid: int = 0
    steps: int = 60
    restart_s: float = 1.0
    pause_s: float = 2.0
    dear: float = 1.0
    most: int | None = None


@pytest.mark.parametrize(
    "case",
    [
        # Eight and four operators are best where the second device takes twice as long. Seen in both halves of ten steps.
        Trained(half(8), firsts=(21,), ops=(8,)),
        Trained(half(8, 40), firsts=(21, 51), ops=(8, 6)),
        Trained(half(8, 40), firsts=(21,), ops=(8,), most=1),
        # A pass that takes long says nothing, nor do all devices that take long.
        Trained(lambda step: 100.0 if step % 20 == 13 else 1.0),
        # What operators take that were moved is not the speed of a device that was known before.
        Trained(half(8), firsts=(21,), ops=(8,), dear=3.0),
        Trained(half(8), restart_s=1e9, unpaid=1),
        Trained(half(8), steps=20),
        # 17 % of a step of 600 s pay for 5,000 s once the last plan has stood for 48 steps.
        Trained(half(8, 40), firsts=(21, 81), ops=(8, 6), pause_s=5000.0, unpaid=1, steps=200),
    ],
)
def test_a_switch_is_made_that_pays(case: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, announced, said, taken = posed(12, 2), list[Job](), list[str](), list[Plan]()
    plan = cut(problem, (6,))

    def announce(run_dir: Path, number: int, job: Job) -> None:
        (run_dir / "ranks" / f"next_{number}").mkdir(parents=True)
        announced.append(job)

    monkeypatch.setattr(replanning, "announce", announce)
    monkeypatch.setattr(replanning, "_sent", lambda old, new, factor: {(1, 0): 640.0})
    monkeypatch.setattr(replanning._ReplannedTraining, "_first_restart_s", lambda self, job, problem: case.restart_s)
    job = Job(plan, Settings(case.steps))
    experiment: Any = SimpleNamespace(
        engine=Slowing(case.factor, case.dear, case.pause_s, announced),
        strategy=replace(STRATEGY, replan=Replan(every=10, most=case.most, slower=0.3)),
        job=lambda captured, problem, plan: Job(plan, Settings(case.steps)),
    )
    recorder: Any = SimpleNamespace(know=lambda plan, predicted: taken.append(plan))
    training = replanning._ReplannedTraining(experiment, problem, job, Progress(warn=said.append), recorder)  # type: ignore[arg-type]
    outcome = training.run(tmp_path)
    assert tuple(one.first for one in outcome.replaced) == case.firsts
    assert tuple(len(plan.stages[0].ops) for plan in taken) == case.ops
    assert len(said) == len(case.firsts) + case.unpaid == len(case.firsts) + sum("the plan stays" in words for words in said)
    if not case.firsts:
        return
    found, words = outcome.replaced[0], said[0]
    assert found.slow == {1: pytest.approx(2.0)} and found.switch is not None
    assert "device 1 takes 2.00 times" in words and "from step 21 on another plan runs" in words
    assert found.switch.moved == (Moved(operators=2, source=1, destination=0),)
    assert found.switch.bytes == found.switch.predicted_bytes == 640 and found.switch.pause_s == case.pause_s
    assert found.switch.samples_per_s == pytest.approx((16 / 600, 16 / 600))
    assert (tmp_path / "saved").read_text() == str(case.ops[-1]) and not list((tmp_path / "ranks").iterdir())
    assert training._machines == problem.cluster, "workers are told of the devices as they were described"


def test_the_first_pause_is_that_of_the_slowest_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = posed(12, 2)
    plan, clock = cut(problem, (6,)), iter((10.0, 11.0))
    job: Any = Job(plan, Settings(20))
    monkeypatch.setattr(Job, "load", lambda run_dir: job, raising=False)
    monkeypatch.setattr(replanning, "_sent", lambda old, new, factor: {})
    monkeypatch.setattr(replanning.time, "thread_time", lambda: next(clock))
    experiment: Any = SimpleNamespace(strategy=STRATEGY)
    training = replanning._ReplannedTraining(experiment, problem, job, Progress(), Any)  # type: ignore[arg-type]
    training._run_dir = tmp_path
    training._built.update({0: 5.0, 1: 2.0})
    slow = replace(problem, cluster=at_speeds(problem.cluster, {0: 1.5, 1: 4.5}))
    assert training._first_restart_s(job, slow) == pytest.approx(3.0 * (1.0 + 2.0))
