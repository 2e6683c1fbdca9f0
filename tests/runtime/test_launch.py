"""Workers that others start: what is printed, what is refused, what is made of what they leave."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from gpp import Distributed, Progress
from gpp.errors import InvalidConfig, WorkerFailed
from gpp.runtime.controller.controller import Follower, all_ended, failure
from gpp.runtime.controller.follow import RankFiles, commands, follow, gather, machines
from gpp.runtime.job import Job
from gpp.runtime.transport.network import program_digest
from gpp.runtime.worker.process import guarded, kind_of
from tests.support.one_device import job_of


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, torch.Tensor]]:
    """A job of two devices."""
    return job_of("digits", (2, 3), 8)


def saved(prepared: tuple[Job, Any], run_dir: Path, **settings: Any) -> Job:
    job, weights = prepared
    job = replace(job, settings=replace(job.settings, **settings))
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir(exist_ok=True)
    return job


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nodes": 2}, "engine.interface=lo: the loopback interface does not join 2 machines"),
        ({"nodes": 2, "interface": "eth0"}, "engine.master_addr=null: 2 machines meet at the address of the first"),
        ({"nodes": 3, "interface": "eth0", "master_addr": "10.0.0.1"}, "engine.nodes=3: there are 2 workers"),
    ],
)
def test_what_does_not_join_the_machines_is_refused(prepared: tuple[Job, Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        Distributed(launch="external", **settings).refuse(prepared[0])


def test_another_program_is_no_place_of_a_launch(prepared: tuple[Job, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"engine.launch=env: is a way to start run.py"):
        Distributed(launch="env").refuse(prepared[0])


def test_an_interface_that_is_not_here_is_refused_before_anything_starts(prepared: tuple[Job, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"engine.interface=eth99"):
        Distributed(interface="eth99").check(prepared[0].plan)
    assert Distributed(interface="eth99", launch="external").check(prepared[0].plan) == ()


def test_the_commands_are_exact(prepared: tuple[Job, Any], tmp_path: Path) -> None:
    job = saved(prepared, tmp_path)
    assert machines(job, None) == (2,)
    assert machines(job, 2) == (1, 1)
    first, second = commands(job, tmp_path, (1, 1), "10.0.0.1", 29501)
    assert first.endswith(
        "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29501 "
        f"-m gpp.runtime.worker {tmp_path}"
    )
    assert first.startswith("OMP_NUM_THREADS=1 ")
    assert second == first.replace("--node-rank 0", "--node-rank 1")


def test_a_worker_without_a_launcher_or_a_job_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"torchrun --nproc-per-node N -m gpp.runtime.worker RUN_DIR"):
        guarded(tmp_path, lambda *place: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="holds no job"):
        guarded(tmp_path, lambda *place: None)


def report(run_dir: Path, rank: int, kind: str, **more: Any) -> None:
    values = {"rank": rank, "cause": rank, "kind": kind, "time": 1.0 * rank, "error": kind, "traceback": "", "out": 0, **more}
    (run_dir / "ranks" / f"rank_{rank}.error.json").write_text(json.dumps(values))


def end(job: Job, run_dir: Path, rank: int, digest: str | None = None, files: dict[str, int] | None = None) -> None:
    said = {"rank": rank, "job": digest or program_digest(run_dir), "files": files or {}}
    (run_dir / "ranks" / f"rank_{rank}.end.json").write_text(json.dumps(said))
    (run_dir / "ranks" / f"rank_{rank}.jsonl").touch()


def test_what_is_collected_must_be_there_and_be_this_job(prepared: tuple[Job, Any], tmp_path: Path) -> None:
    job = saved(prepared, tmp_path)
    end(job, tmp_path, 0)
    with pytest.raises(WorkerFailed, match=r"worker 1 failed: has not ended.*rank_1.end.json"):
        gather(job, tmp_path, Progress())
    end(job, tmp_path, 1, "another")
    with pytest.raises(WorkerFailed, match="worker 1 failed: ran another job"):
        gather(job, tmp_path, Progress())
    end(job, tmp_path, 1)
    assert gather(job, tmp_path, Progress()).losses == {}
    assert follow(job, tmp_path, Progress()).losses == {}
    # A copy under way: the word of the end may be here before what it is about.
    for cut in ("", '{"rank'):
        (tmp_path / "ranks" / "rank_1.end.json").write_text(cut)
        assert RankFiles(job, tmp_path).ended() == [0]
    end(job, tmp_path, 1, files={"rank_1.jsonl": 9, "device_1.json": 1})
    assert RankFiles(job, tmp_path).ended() == [0]
    (tmp_path / "ranks" / "rank_1.jsonl").write_text("9 letters")
    assert RankFiles(job, tmp_path).ended() == [0]
    (tmp_path / "ranks" / "device_1.json").write_text("{}")
    assert RankFiles(job, tmp_path).ended() == [0, 1]


def test_a_folder_that_is_deleted_under_a_run_ends_it(tmp_path: Path) -> None:
    logs = Follower(tmp_path, 1, 8, Progress())
    logs.poll()  # nothing has begun
    with pytest.raises(WorkerFailed, match=r"rank_0.jsonl was deleted or moved while .*Fix: start the run again"):
        logs.poll(ended=True)
    (tmp_path / "rank_0.jsonl").write_text('{"step": 0, "start": 0.0, "end": 1.0}\n')
    logs.poll()
    (tmp_path / "rank_0.jsonl").unlink()
    with pytest.raises(WorkerFailed, match="was deleted or moved"):
        logs.poll()


def test_a_process_that_a_library_ends_leaves_its_last_words(tmp_path: Path) -> None:
    (words := tmp_path / "stderr.log").write_text("terminate called\n")
    found = failure(tmp_path, {0: 1, 1: -signal.SIGABRT}, {1: str(words)})
    assert (found.rank, found.traceback, found.gone) == (1, "terminate called\n", (1,))
    assert "killed by SIGABRT; a library ends its process so" in str(found) and "ulimit -u" in str(found)


def test_the_first_cause_is_told_from_what_came_of_it(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    report(tmp_path, 0, "lost")
    report(tmp_path, 3, "ended")
    # Without better knowledge, who said nothing was killed.
    assert failure(ranks, {1: None, 2: None}, {}).rank == 1
    assert "ended without a word" in str(failure(ranks, {1: None}, {}))
    assert failure(ranks, {}, {}).rank == 0
    report(tmp_path, 4, "hang", cause=2, out=3)
    report(tmp_path, 5, "hang", cause=1, out=1)
    assert failure(ranks, {1: None, 2: None}, {}).rank == 1
    report(tmp_path, 6, "error")
    assert failure(ranks, {1: None, 0: 1}, {}).rank == 6
    # A signal that nobody here sent comes before all else; one that may have gone to all comes last among them.
    assert failure(ranks, {7: -9, 8: -15}, {}).reason == "killed by SIGKILL; the kernel does that to a process when memory runs out"
    assert failure(ranks, {7: -11, 5: -15}, {}).reason == "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("os.kill(os.getpid(), 15)", "worker 1 failed: killed by SIGTERM, which this run did not send: a user, a scheduler or"),
        ("sys.exit(7)", "worker 1 failed: exit code 7"),
    ],
)
def test_the_worker_that_ended_first_is_named_and_not_those_that_are_stopped_for_it(tmp_path: Path, ends: str, says: str) -> None:
    """The processes are bare ones of Python: their codes are what counts."""
    (tmp_path / "ranks").mkdir()
    code = f"import os, sys, time; {ends} if os.environ['RANK'] == '1' else time.sleep(60)"
    ranks = range(3)
    context = start_processes(
        "w",
        sys.executable,
        dict.fromkeys(ranks, ("-c", code)),
        {rank: {"RANK": str(rank)} for rank in ranks},
        DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL),
    )
    with pytest.raises(WorkerFailed) as failed:
        while not all_ended(context, tmp_path / "ranks"):
            pass
    assert str(failed.value).startswith(says)


class Torn(RuntimeError):
    """An error of a user's whose words are those of another program's."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "lost"),
        (RuntimeError("[enforce fail at /x/gloo/transport/tcp/device.cc:84] ifa != nullptr"), "lost"),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), "lost"),
        (RuntimeError("no igloo of 3 blocks"), "error"),
        (RuntimeError("gloo: my model raises this"), "error"),
        (Torn("[/a/gloo/pair.cc:5] torn"), "error"),
        (ValueError("nccl"), "error"),
    ],
)
def test_only_what_a_backend_raises_is_a_lost_connection(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind


def test_silence_of_all_and_the_word_of_a_launcher_end_the_waiting(
    prepared: tuple[Job, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["gpp.runtime.controller.follow"]
    monkeypatch.setattr(module, "GRACE_S", 0.3)
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    job = saved(prepared, tmp_path, timeout_s=0.2)
    with pytest.raises(WorkerFailed, match="worker 0 failed: the job 7 is over"):
        follow(job, tmp_path, Progress(), over=lambda ranks: WorkerFailed(0, "the job 7 is over"))
    (tmp_path / "ranks" / "rank_0.status").write_bytes(b"a sign of life")
    with pytest.raises(WorkerFailed, match="no worker has given a sign of life"):
        follow(job, tmp_path, Progress())
    report(tmp_path, 1, "error", error="ValueError: x")
    with pytest.raises(WorkerFailed, match="worker 1 failed: ValueError: x"):
        follow(job, tmp_path, Progress())
    assert RankFiles(job, tmp_path).open() == [0]
