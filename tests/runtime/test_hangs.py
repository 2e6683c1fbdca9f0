"""Real workers that stop answering: on one machine, on two (network namespaces), under Slurm's stand-in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpp.errors import WorkerFailed
from gpp.runtime.controller.follow import follow, run_slurm
from gpp.runtime.controller.slurm import Slurm
from gpp.runtime.engine import Progress
from gpp.runtime.hang_detection.status import read_state
from gpp.runtime.job import Job
from gpp.runtime.run_dir import under_way
from tests.support.cli import ROOT, environment, run, start, workers_of
from tests.support.inprocess import few_layers
from tests.support.machines import Machine, two_machines, why_not
from tests.support.traces import check_trace
from tests.support.warm import warm

pytestmark = pytest.mark.dist

COMMON = [
    *few_layers("digits"),
    "logger=none",
    "cost=analytical",
    "strategy.planner.replication=false",
    "microbatch_size=8",
    "dtype=float64",
    "evaluate_every=0",
]
STEPS = 6
FOR_EVER = 1_000_000
TIMEOUT_S = 4.0


def wait_for_steps(run_dir: Path, ranks: int, steps: int = STEPS) -> None:
    """Until every rank has done so many."""
    logs = [run_dir / "ranks" / f"rank_{rank}.jsonl" for rank in range(ranks)]
    until = time.monotonic() + 120
    while not all(log.exists() and log.read_bytes().count(b"\n") >= steps for log in logs):
        assert time.monotonic() < until, "the workers do not start"
        time.sleep(0.1)


def pid_of(run_dir: Path, rank: int) -> int:
    """A worker's process, once it has said so: its status file exists a moment before it says anything."""
    path, until = run_dir / "ranks" / f"rank_{rank}.status", time.monotonic() + 120
    while (state := read_state(path)) is None or not state.pid:
        assert time.monotonic() < until, f"rank {rank} does not start"
        time.sleep(0.01)
    return state.pid


@dataclass
class Stopped:
    """A run one of whose ranks was stopped."""

    code: int
    out: str
    took_s: float
    run_dir: Path
    pids: list[int]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """One machine: rank 1 stands still for a while as it loads, then come some steps, then SIGSTOP for rank 2."""
    run_dir = tmp_path_factory.mktemp("stopped")
    pids: list[int] = []
    words = [*COMMON, "cluster.num_devices=3", f"steps={FOR_EVER}", f"engine.timeout_s={TIMEOUT_S}"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, run_dir, *words)
        try:
            late = pid_of(run_dir, 1)
            os.kill(late, signal.SIGSTOP)
            time.sleep(TIMEOUT_S * 0.6)
            os.kill(late, signal.SIGCONT)
            wait_for_steps(run_dir, 3)
            pids = [pid_of(run_dir, rank) for rank in range(3)]
            os.kill(pids[2], signal.SIGSTOP)
            began = time.monotonic()
            done = running.result(timeout=90)
        finally:
            # Where something above failed, it would train for ever.
            if not running.done() and (here := under_way(run_dir)):
                os.kill(here.pid, signal.SIGKILL)
    return Stopped(done.code, done.out, time.monotonic() - began, run_dir, pids)


def test_a_stopped_rank_ends_the_run_and_is_named(stopped: Stopped) -> None:
    assert stopped.code == 1
    assert len({*stopped.pids}) == 3
    assert stopped.took_s > TIMEOUT_S - 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in stopped.pids)
    result = json.loads((stopped.run_dir / "result.json").read_text())
    first, *lines = result["reason"].splitlines()
    assert result["status"] == "failed"
    assert first.startswith("worker 2 failed: stopped by a signal (SIGSTOP or SIGTSTP), ")
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        assert line.startswith(f"  rank {rank} (")
        assert ("stopped by a signal" if rank == 2 else "waits for s") in line
    # Follow the waits: they all lead to rank 2.
    assert sum("of rank 2" in line for line in lines) >= 1
    assert first.split(", ")[1].split(" of step")[0].removeprefix("in ") in lines[2]


@dataclass
class External:
    """A run that two machines did."""

    code: int
    out: str
    run_dir: Path
    commands: list[str]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Machine, Machine]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_machines() as found:
        yield found


def start_on(pair: tuple[Machine, Machine], commands: list[str]) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = f"{sys.executable} -m torch.distributed.run"
    return [
        machine.start(command.replace("torchrun", launcher), cwd=ROOT, env=env)
        for machine, command in zip(pair, commands, strict=True)
    ]


@pytest.fixture(scope="module")
def external(pair: tuple[Machine, Machine], tmp_path_factory: pytest.TempPathFactory) -> External:
    """run.py prints what to type on each machine; it is typed there; run.py follows to the end."""
    run_dir = tmp_path_factory.mktemp("external")
    process = start(
        run_dir,
        *COMMON,
        "cluster.num_devices=2",
        f"steps={STEPS}",
        "engine.launch=external",
        "engine.nodes=2",
        "engine.interface=gpp0",
        f"engine.master_addr={pair[0].address}",
    )
    assert process.stdout is not None
    said, commands = [], []
    for line in process.stdout:
        said.append(line)
        commands += [line.strip()] if "torchrun" in line else []
        if "waiting for 2 workers" in line:
            break
    launchers = start_on(pair, commands)
    out, _ = process.communicate(timeout=120)
    for launcher in launchers:
        launcher.communicate(timeout=60)
    return External(process.returncode, "".join(said) + out, run_dir, commands)


@pytest.mark.long
def test_two_machines_train_to_the_losses_of_one(external: External, stopped: Stopped) -> None:
    assert external.code == 0, external.out
    assert len(external.commands) == 2
    result = json.loads((external.run_dir / "result.json").read_text())
    one = json.loads((stopped.run_dir / "result.json").read_text())
    assert len(result["loss"]) == STEPS
    # The other run has three stages: the same training, whose sums may round otherwise.
    assert result["loss"] == pytest.approx(one["loss"][:STEPS], rel=1e-12)
    assert result["measured"]["iteration_s"] > 0
    assert not check_trace(json.loads((external.run_dir / "trace.json").read_text()))
    assert (external.run_dir / "checkpoints" / "final" / "stage_0.safetensors").exists()


def again(other: Path, run_dir: Path, **settings: object) -> Job:
    """The job of another run once more in a folder, under other settings."""
    (run_dir / "ranks").mkdir(parents=True)
    (run_dir / "job").symlink_to(other / "job") if not settings else (run_dir / "job").mkdir()
    if settings:
        for path in (other / "job").iterdir():
            if path.name != "settings.json":
                (run_dir / "job" / path.name).symlink_to(path)
        values = json.loads((other / "job" / "settings.json").read_text())
        (run_dir / "job" / "settings.json").write_text(json.dumps({**values, **settings}))
    return Job.load(run_dir)


@pytest.mark.long
def test_a_link_that_goes_down_ends_the_run_on_both_sides(
    pair: tuple[Machine, Machine], external: External, tmp_path: Path
) -> None:
    job = again(external.run_dir, tmp_path / "cut", steps=FOR_EVER, timeout_s=TIMEOUT_S)
    commands = [command.replace(str(external.run_dir), str(tmp_path / "cut")) for command in external.commands]
    launchers = start_on(pair, commands)
    wait_for_steps(tmp_path / "cut", 2)
    pair[1].cut()
    with pytest.raises(WorkerFailed) as failed:
        follow(job, tmp_path / "cut", Progress())
    # Seen from rank 0's machine, it is the other one that is cut off.
    assert failed.value.rank == 1
    first, *lines = failed.value.reason.splitlines()
    assert "not heard of for" in first
    assert [("not heard of" in line) for line in lines] == [False, True]
    assert "waits for" in lines[0]
    for launcher in launchers:
        launcher.communicate(timeout=60)
        assert launcher.returncode == 1
    assert not workers_of(tmp_path / "cut")


def test_a_wrong_number_of_workers_is_refused_with_the_reason(stopped: Stopped, tmp_path: Path) -> None:
    again(stopped.run_dir, tmp_path / "run")
    script, out = str(ROOT / "gpp" / "runtime" / "worker" / "__main__.py"), tmp_path / "out"
    assert warm().run([str(tmp_path / "run")], environment(RANK="0", WORLD_SIZE="4"), out, script=script) == 1
    assert out.read_text().strip() == (
        "error: WORLD_SIZE=4: the plan has 3 devices, and every one is a worker. "
        "Fix: start 3 workers in all (torchrun: --nnodes, --nproc-per-node)."
    )


@pytest.mark.long
def test_slurm_runs_a_task_a_device_and_the_job_does_not_outlive_the_run(external: External, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    slurm = Slurm(executor="local", time_min=5)
    job = again(external.run_dir, tmp_path / "slurm", interface="lo")
    logs = run_slurm(job, tmp_path / "slurm", Progress(), slurm, (2,))
    one = json.loads((external.run_dir / "result.json").read_text())
    assert [logs.losses[step]["loss"] for step in range(STEPS)] == one["loss"]
    assert not workers_of(tmp_path / "slurm")
