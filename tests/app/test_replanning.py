"""A stream that goes on when devices are lost or slow; `python -m tests.checks.serving` kills many more."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from gpp import Cluster, Plan, Progress, Sequential, Strategy
from gpp.app.replanning import _ReplannedCourse
from gpp.errors import InvalidConfig, OffPace, WorkerFailed
from gpp.graph.forward_only import forward_only
from gpp.links import Link, PairLink
from gpp.replan import DevicePace, Replan, at_speeds, without
from gpp.runtime.hang_detection.watch import said_pids
from gpp.schedules.forward_only import ForwardOnly
from gpp.timeline import Outcome
from tests.support import graphs
from tests.support.cli import Finished, run
from tests.support.graphs import DEVICE
from tests.support.inprocess import few_layers

STREAM = [
    "mode=inference",
    "model=digits",
    *few_layers("digits"),
    "logger=none",
    "cost=analytical",
    "strategy=even",
    "minibatch_size=8",
    "microbatch_size=4",
    "strategy.replan.slower=1e9",
    "steps=300",
]


def test_a_device_is_off_its_time_against_the_best() -> None:
    pace = DevicePace({0: 1.0, 1: 2.0, 2: 4.0}, Replan(every=12))
    for number in range(12):
        assert not pace.off() and not pace.factors() and not pace.usual()
        pace.note(0, 3.0)
        pace.note(1, 6.0 + number % 2)  # 6.5 on the mean: 1.083 times as long as the first one takes
        pace.note(2, 999.0 if number == 8 else 12.0)  # once, in the newer half
    assert pace.factors()[1] == pytest.approx(3.25) and pace.factors()[2] > 40.0 and not pace.off()
    assert pace.usual() == pytest.approx({0: 3.0, 1: 3.25, 2: 3.0})
    for number in range(12):
        pace.note(0, 3.0)
        pace.note(1, 9.0)  # the window forgets the oldest
        pace.note(2, 12.0)
        assert pace.off() == ({1: pytest.approx(1.5)} if number >= 8 else {}), "both halves say so, the newer one how much"
    pace.expect({0: 3.0, 1: 9.0, 2: 12.0})
    assert not pace.factors()
    for device, seconds in ((0, 3.0), (1, 9.0), (2, 12.0)) * 12:
        pace.note(device, seconds)
    assert not pace.off()  # the second one is as slow as before


def test_what_is_left_of_a_cluster() -> None:
    links = (
        PairLink(between=(0, 3), link=Link(latency_s=0.0, bandwidth_bytes_per_s=3.0)),
        PairLink(between=(1, 2), link=Link(latency_s=0.0, bandwidth_bytes_per_s=5.0)),
        PairLink(between=("slow", "quick"), link=Link(latency_s=0.0, bandwidth_bytes_per_s=7.0)),
    )
    devices = tuple(replace(DEVICE, name=name, speed_factor=0.5 + i) for i, name in enumerate(["quick", "slow", "quick", "quick"]))
    whole = Cluster(name="four", devices=devices, nodes=(0, 0, 1, 1), intra_node=Link(latency_s=1.0, bandwidth_bytes_per_s=1.0),
                    inter_node=Link(latency_s=2.0, bandwidth_bytes_per_s=1.0), links=links)  # fmt: skip
    for lost in ({0}, {1}, {2}, {0, 1}, {1, 3}):
        left, kept = without(whole, lost)
        assert [left.devices[i] for i in range(left.num_devices)] == [whole.devices[d] for d in kept]
        assert {*kept} == {0, 1, 2, 3} - lost
        for a in range(left.num_devices):
            for b in range(left.num_devices):
                assert a == b or left.link(a, b) == whole.link(kept[a], kept[b])
    with pytest.raises(InvalidConfig, match=r"every device is lost.*Fix: "):
        without(whole, {0, 1, 2, 3})
    assert [device.speed_factor for device in at_speeds(whole, {1: 2.0}).devices] == [0.5, 0.75, 2.5, 3.5]


@dataclass(frozen=True)
class Settings:
    steps: int = 20
    first_step: int = 0


@dataclass(frozen=True)
class Job:
    plan: Plan
    settings: Settings = field(default_factory=Settings)
    cluster: Cluster | None = None
    captured: Any = None


class Engine:
    """Answers requests on a plan, and ends as its list says: (requests answered, seconds of a pass by rank, how it ends)."""

    def __init__(self, *runs: tuple[int, list[float], Exception | None]) -> None:
        self.runs, self.firsts = list(runs), list[int]()

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        count, seconds, end = self.runs.pop(0)
        self.firsts.append(job.settings.first_step)
        for step in range(job.settings.first_step, job.settings.first_step + count):
            for rank, own in enumerate(seconds):
                progress.on_pass(rank, own)
            progress.on_step(step + 1, None, None)
        if end is not None:
            raise end
        return Outcome()


def serve(engine: Engine, devices: int, slower: float = 0.2, most: int = 9) -> tuple[list[int], list[str], Outcome]:
    """Requests in the order in which they were answered, what was said, and the outcome."""
    problem = replace(graphs.problem(forward_only(graphs.chain(6)), devices, 4, microbatch_size=2), cluster=graphs.cluster(devices))
    strategy = Strategy(name="sequential", planner=Sequential(replication=False), schedule=ForwardOnly())
    experiment: Any = SimpleNamespace(engine=engine, strategy=strategy, job=lambda captured, problem, plan: Job(plan))
    done, said = list[int](), list[str]()
    progress = Progress(on_step=lambda step, loss, rate: done.append(step), warn=said.append)
    stream = _ReplannedCourse(experiment, problem, Job(strategy.plan(problem)), progress)  # type: ignore[arg-type]
    while True:
        try:
            return done, said, stream.run(Path(), Replan(most=most, slower=slower, every=10))
        except (WorkerFailed, OffPace) as error:
            stream.replace_plan(error)


def test_answers_come_once_and_in_order_whatever_is_lost() -> None:
    killed = [WorkerFailed(rank, "killed by SIGKILL", gone=(rank,)) for rank in (1, 0)]
    engine = Engine((7, [], killed[0]), (0, [], killed[1]), (13, [], None))
    done, said, outcome = serve(engine, 3)
    assert done == [*range(1, 21)] and engine.firsts == [0, 7, 7]
    # The second loss is of what was the third device: by then it is rank 0's neighbour that is gone.
    assert [(found.first, found.lost, found.devices) for found in outcome.replaced] == [(8, (1,), (0, 2)), (8, (0,), (2,))]
    assert said == [str(found) for found in outcome.replaced] and "device 1 is lost (killed by SIGKILL)" in said[0]
    # All is answered, and a worker dies on its way out: the last request is asked again, and counts once.
    engine = Engine((20, [], killed[0]), (1, [], None))
    assert serve(engine, 2)[0] == [*range(1, 21)] and engine.firsts == [0, 19]


def test_a_failure_that_would_happen_again_is_one() -> None:
    for devices, gone in ((2, ()), (1, (0,)), (2, (0, 1))):
        with pytest.raises(WorkerFailed, match="worker 0 failed: out of luck"):
            serve(Engine((3, [], WorkerFailed(0, "out of luck", gone=gone))), devices)


def test_a_slow_device_gets_less_to_do() -> None:
    # Six operators of a second a sample on two devices: 6 s a micro-batch of two each. The second one takes twice as long.
    engine = Engine((20, [6.0, 12.0], None), (11, [8.0, 8.0], None))
    done, said, outcome = serve(engine, 2)
    assert done == [*range(1, 21)] and engine.firsts == [0, 9]  # the tenth request completes the window, and is asked again
    (found,) = outcome.replaced
    assert found.slow == {1: 2.0} and not found.lost and "device 1 takes 2.00 times as long as planned" in said[0]
    # Two operators at half the speed take as long as four; a device that is slower still, with one left, changes nothing more.
    engine = Engine((20, [6.0, 6.6], None))
    assert serve(engine, 2)[0] == [*range(1, 21)] and engine.firsts == [0]


def kill_when_answered(run_dir: Path, requests: int, world: int) -> None:
    """Kill the last worker once it has answered so many requests."""
    log = run_dir / "ranks" / f"rank_{world - 1}.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (log.exists() and log.read_text().count("\n") >= requests):
        time.sleep(0.01)
    os.kill(said_pids(run_dir / "ranks", world)[world - 1], signal.SIGKILL)


def answers(found: Finished) -> bytes:
    assert found.code == 0, found.out
    return (found.run_dir / "answers.safetensors").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The stream on one device."""
    return run(tmp_path_factory.mktemp("alone"), *STREAM, "cluster.num_devices=1")


def streamed_and_killed(run_dir: Path, *words: str) -> Finished:
    """A stream on two devices, the second of which is killed after some of the requests."""
    killer = threading.Thread(target=kill_when_answered, args=(run_dir, 20, 2))
    killer.start()
    found = run(run_dir, *STREAM, "cluster.num_devices=2", *words)
    killer.join()
    return found


def test_a_killed_worker_costs_no_answer(alone: Finished, tmp_path: Path) -> None:
    found = streamed_and_killed(tmp_path, "strategy.replan.every=32")
    assert answers(found) == answers(alone)
    steps = [json.loads(line)["step"] for line in (found.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(300))
    (replaced,) = found.result["replaced"]
    assert replaced["lost"] == [1] and replaced["devices"] == [0] and 20 <= replaced["first"] <= 300
    assert "killed by SIGKILL" in replaced["reason"] and found.result["plan"]["num_devices"] == 1
    assert (found.run_dir / "replaced" / "0" / "plan.json").is_file()


def test_a_stopped_stream_in_a_used_directory_leaves_no_answers_of_the_run_before(alone: Finished, tmp_path: Path) -> None:
    """The second run has other weights."""
    folder, first = tmp_path / "run", answers(alone)
    shutil.copytree(alone.run_dir, folder)
    found = streamed_and_killed(folder, "seed=1")
    assert found.code == 1, found.out
    assert (folder / "earlier" / "1" / "answers.safetensors").read_bytes() == first
    rows, before = load_file(folder / "answers.safetensors"), load_file(folder / "earlier" / "1" / "answers.safetensors")
    (name,) = (name for name in rows if not name.startswith("answered."))
    there, count = rows[f"answered.{name}"], found.result["answers"]
    assert count == {"samples": len(there), "answered": int(there.sum())} and 0 < count["answered"] < len(there)
    assert rows[name][~there].isnan().all() and not (rows[name] == before[name]).all(-1).any()
    assert f"{count['answered']} of {count['samples']} samples" in found.out
