"""engine.launch=env: the same command on every machine; what it is told by, what it refuses, how it ends everywhere."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpp
from gpp.errors import InvalidConfig, WorkerFailed
from gpp.runtime.controller import attendant, board
from gpp.runtime.controller.attendant import Attendant
from gpp.runtime.controller.board import Board, Inbox, Mail, open_store, send_file
from gpp.runtime.controller.follow import RankFiles
from gpp.runtime.controller.leader import Leader
from gpp.runtime.controller.place import LaunchPlace, hosts
from gpp.runtime.engine import Progress
from gpp.runtime.run_dir import RUN, RunDir
from gpp.runtime.transport.network import client, serve
from tests.app.test_pipeline import batches, decayed, model_of, plain_losses
from tests.app.test_pipeline import started as pipeline_of
from tests.runtime.test_processes import COMMON, check_against_one_device
from tests.support.cli import ROOT, Finished, run, workers_of
from tests.support.long import thinned
from tests.support.machines import Machine, listening, two_machines, why_not
from tests.support.one_process import answered, check_only

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "node[07-08]"}


def place_of(env: dict[str, str], interface: str = "eth0", address: str | None = None) -> LaunchPlace:
    return LaunchPlace.of(env, interface=interface, address=address, port=29500)


def test_the_place_of_a_process_is_what_its_launcher_says() -> None:
    there: dict[str, Any] = {"rank": 3, "world": 4, "local_rank": 1, "machines": 2}
    assert place_of(TORCHRUN) == LaunchPlace(**there, address="10.0.0.1", port=29501, agent=True)
    assert place_of(SLURM) == LaunchPlace(**there, address="node07", port=29500, agent=False)
    # torchrun inside a Slurm job is torchrun; a step's nodes may be fewer than the job's.
    assert place_of({**SLURM, **TORCHRUN}) == place_of(TORCHRUN)
    step = place_of({**SLURM, "SLURM_STEP_NODELIST": "node08"}, interface="lo")
    assert (step.machines, step.address) == (1, "127.0.0.1")
    assert place_of(SLURM, address="10.9.9.9").address == "10.9.9.9"
    bare = {name: value for name, value in TORCHRUN.items() if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert place_of(bare, address="10.9.9.9") == LaunchPlace(
        rank=3, world=4, local_rank=1, machines=None, address="10.9.9.9", port=29500, agent=False
    )


@pytest.mark.parametrize("env", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_a_missing_or_wrong_variable_is_named_with_an_example(env: dict[str, str]) -> None:
    for name in env:
        if name in ("GROUP_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            continue
        less = {other: value for other, value in env.items() if other != name}
        first = name in ("RANK", "SLURM_PROCID")
        says = r"engine.launch=env: .*neither RANK \(torchrun\) nor SLURM_PROCID" if first else rf"{name}=null: .*as in {name}="
        with pytest.raises(InvalidConfig, match=says):
            place_of(less)
        if name not in ("MASTER_ADDR", "SLURM_JOB_NODELIST"):
            with pytest.raises(InvalidConfig, match=f"{name}=two: must be an integer"):
                place_of({**env, name: "two"})
    rank = "RANK" if "RANK" in env else "SLURM_PROCID"
    with pytest.raises(InvalidConfig, match=f"{rank}='?4'?: must be less than"):
        place_of({**env, rank: "4"})
    with pytest.raises(InvalidConfig, match=r"engine.interface=lo: the loopback interface does not join 2 machines"):
        place_of(env, interface="lo")


def test_lists_of_nodes_are_read_as_slurm_writes_them() -> None:
    assert hosts("node7") == ("node7",)
    assert hosts("a[01-03,7]-x,b") == ("a01-x", "a02-x", "a03-x", "a7-x", "b")
    assert hosts("r[1-2]n[08-10]") == ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")
    for wrong in ("", "a[", "a[x-y]", "a[1-2", "a[]"):
        with pytest.raises(InvalidConfig, match="is no list of hosts"):
            hosts(wrong)


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which a store is kept."""
    store = serve("lo", "127.0.0.1", 0, timedelta(seconds=10))
    yield store.port
    del store


def place(rank: int, port: int, world: int = 2) -> LaunchPlace:
    return LaunchPlace(rank=rank, world=world, local_rank=rank, machines=1, address="127.0.0.1", port=port, agent=True)


def until(holds: Callable[[], object], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_words_and_silence_are_heard(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "PERIOD_S", 0.05)
    store = client("127.0.0.1", port, timedelta(seconds=10))
    one, two = Board(store, rank=0, reads=[1]), Board(store, rank=1, reads=[0])
    assert one.heard(1) == {} or "beat" in one.heard(1)
    two.say(host="there")
    until(lambda: one.heard(1).get("host") == "there")
    assert one.silent_s(1) < 1.0
    two.close()
    until(lambda: one.silent_s(1) > 0.5)
    # Who stood still itself does not take the others for dead: a second counts at most.
    quiet_s = one.silent_s(1)
    later_s = time.monotonic() + 1000.0
    monkeypatch.setattr(board.time, "monotonic", lambda: later_s)
    assert one.silent_s(1) <= quiet_s + 1.01
    monkeypatch.undo()
    one.close()


def test_files_come_whole_and_in_order_and_only_those_that_may(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mail, "BYTES", 1000)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "large").write_bytes(os.urandom(12_345))
    (here / "empty").write_bytes(b"")
    (here / "log").write_bytes(b"one\n")
    store = client("127.0.0.1", port, timedelta(seconds=10))
    mail = Mail(store, "a")
    waited: list[int] = []

    def send() -> None:
        for name in ("large", "empty", "log"):
            send_file(mail, here, name, lambda: waited.append(1))
        (here / "log").write_bytes(b"one\ntwo\n")
        assert send_file(mail, here, "log", at=4) == 8

    sender = threading.Thread(target=send)
    sender.start()
    until(lambda: waited)  # a store holds a few messages at a time, not the file
    inbox, came = Inbox(Mail(store, "a"), there, lambda name: name in ("large", "empty", "log")), list[str]()
    until(lambda: came.append(inbox.take() or "") or [name for name in came if name] == ["large", "empty", "log", "log"])
    sender.join()
    assert (there / "large").read_bytes() == (here / "large").read_bytes()
    assert (there / "log").read_bytes() == b"one\ntwo\n"
    assert not list(there.glob("*.part"))
    bad = Mail(store, "b")
    send_file(bad, here, "log")
    with pytest.raises(WorkerFailed, match="none of this run's"):
        Inbox(Mail(store, "b"), there, lambda name: False).take()
    head = {"file": "log", "at": 0, "grows": False, "last": True, "sha256": "0"}
    bad.send(json.dumps(head).encode() + b"\nX", lambda: None)
    late = Mail(store, "b")
    late._next = 1
    with pytest.raises(WorkerFailed, match="log has changed on its way"):
        Inbox(late, there, lambda name: True).take()
    assert (there / "log").read_bytes() == b"one\ntwo\n"


def attend(place: LaunchPlace, words: list[str], limit_s: float = 20.0) -> tuple[threading.Thread, list[int]]:
    """Another rank, in a thread; its exit code."""
    codes: list[int] = []

    def call() -> None:
        codes.append(Attendant(place, interface="lo", words=words, limit_s=limit_s).run())

    thread = threading.Thread(target=call)
    thread.start()
    return thread, codes


@pytest.mark.parametrize(
    ("code", "reason"),
    thinned([(0, None), (1, "ValueError: x"), (3, "no plan fits"), (2, "steps=0: must be\nat least 1"), (143, "stopped")], 3),
)
def test_the_others_end_as_rank_0_does(port: int, code: int, reason: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    others = [attend(place(rank, port, 3), ["x"]) for rank in (1, 2)]
    with Leader(place(0, port, 3), interface="lo", words=["x"], limit_s=20.0) as leader:
        until(lambda: all(leader._board.heard(rank) for rank in (1, 2)))
        leader.end(code, reason)
    for thread, codes in others:
        thread.join(timeout=20)
        assert codes == [code]
    said = capfd.readouterr().err
    line = f"error: rank 0 has ended with code {code}: {str(reason).splitlines()[0]}"
    # Both are threads of this process here, and the end of one's line may come behind the other's.
    assert said.replace("\n", "") == (line * 2 if code else "")


def test_who_comes_while_rank_0_ends_hears_how(capfd: pytest.CaptureFixture[str]) -> None:
    """Without an agent the store ends with rank 0, which has refused its words before the others were there."""
    first = LaunchPlace(rank=0, world=2, local_rank=0, machines=1, address="127.0.0.1", port=free_port(), agent=False)
    with Leader(first, interface="lo", words=[], limit_s=20.0) as leader:
        thread, codes = attend(replace(first, rank=1, local_rank=1), [])
        leader.end(2, "steps=0: must be at least 1")
        assert leader._board.heard(1)["left"]
    thread.join(timeout=20)
    assert codes == [2]


def test_a_machine_whose_folder_is_deleted_says_so_once(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), end=lambda patience_s: None)
    monkeypatch.setattr(Attendant, "_get_job", lambda self: (tmp_path / "deleted", {}))
    monkeypatch.setattr(attendant, "PlaceWorker", SimpleNamespace(start=lambda *_: works))
    thread, _ = attend(place(1, port), [])
    with Leader(place(0, port), interface="lo", words=[], limit_s=20.0) as leader:
        with pytest.raises(WorkerFailed, match=r"^worker 1 failed: /.*rank_1.log was deleted or moved"):
            until(lambda: leader._raise_gone())
        leader.end(1, "its folder is gone")
    thread.join(timeout=20)


def test_an_attempt_hears_nothing_of_the_one_before_but_where_it_ran(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher's store lives as long as the launcher (torchrun --max-restarts)."""
    run = RunDir(tmp_path)
    for attempt, code in enumerate((1, 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        thread, codes = attend(place(1, port), ["x"])
        with Leader(place(0, port), interface="lo", words=["x"], limit_s=20.0) as leader:
            assert leader.before == (tmp_path if attempt else None)
            until(lambda: leader._board.heard(1).get("words"))
            run.claim()
            run.begin()
            assert run.run is not None
            leader.began(tmp_path, run.run.id)
            leader.end(code, "killed")
        thread.join(timeout=20)
        assert codes == [code]
    # Another run has taken the directory over meanwhile.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with Leader(place(0, port), interface="lo", words=["x"], limit_s=20.0) as leader:
        (tmp_path / RUN).write_text((tmp_path / RUN).read_text().replace(run.run.id, "another"))
        assert leader.before is None


def test_a_rank_0_that_fails_without_a_word_ends_the_others(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    thread, codes = attend(place(1, port), [])
    with pytest.raises(ZeroDivisionError), Leader(place(0, port), interface="lo", words=[], limit_s=20.0) as leader:
        until(lambda: leader._board.heard(1))
        raise ZeroDivisionError
    thread.join(timeout=20)
    assert codes == [1]


def test_a_rank_0_that_is_gone_or_hands_nothing_out_ends_the_others(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attendant, "LOST_S", 1.0)
    monkeypatch.setattr(board, "PERIOD_S", 0.1)
    leader = Leader(place(0, port), interface="lo", words=[], limit_s=20.0)
    slow, slow_codes = attend(place(1, port), [], limit_s=0.5)
    until(lambda: "gone" in leader._board.heard(1))
    gone, gone_codes = attend(place(1, port), [])
    time.sleep(0.5)
    leader._board.close()  # as if it was killed
    for thread, codes in ((slow, slow_codes), (gone, gone_codes)):
        thread.join(timeout=20)
        assert codes == [1]
    said = capfd.readouterr().err
    assert "has handed out no job within 0.5 s (engine.startup_timeout_s)" in said
    assert "gives no sign of life for" in said


def takes(place: LaunchPlace, part: str = "") -> tuple[threading.Thread, list[Any]]:
    """Another rank that is a worker itself, in a thread; what it got, or why it got nothing."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.extend(Attendant(place, interface="lo", words=[], limit_s=20.0, part=part).take())
        except WorkerFailed as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    return thread, found


def test_a_rank_that_is_a_worker_itself_takes_the_job_or_hears_why_there_is_none(port: int, tmp_path: Path) -> None:
    leader = Leader(place(0, port), interface="lo", words=[], limit_s=20.0)
    thread, found = takes(place(1, port))
    run = RunDir(tmp_path)
    run.claim()
    run.begin()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "plan.json").write_text("{}")
    job: Any = SimpleNamespace(settings=SimpleNamespace(threads=1))
    leader.give(job, tmp_path, Progress())
    thread.join(timeout=20)
    assert found == [tmp_path.resolve(), None] and not leader._board.open
    # A further pipeline of the launch has a part of its own, in which the first one's job is not.
    other = Leader(place(0, port), interface="lo", words=[], limit_s=20.0, part="second")
    thread, found = takes(place(1, port), "second")
    other.end(1, "no plan fits")
    thread.join(timeout=20)
    assert found == ["worker 0 failed: no plan fits"]


def test_a_store_that_nobody_opens_is_waited_for_only_so_long() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = place(1, free.getsockname()[1])
        with pytest.raises(WorkerFailed, match=r"opened no store at 127.0.0.1:\d+ within 0.5 s"):
            open_store(nobody, interface="lo", limit_s=0.5)
        free.listen()
        taken = LaunchPlace(rank=0, world=2, local_rank=0, machines=1, address="127.0.0.1", port=nobody.port, agent=False)
        with pytest.raises(InvalidConfig, match=r"MASTER_PORT=\d+: cannot be bound"):
            open_store(taken, interface="lo", limit_s=0.5)


def leader_that_heard(said: dict[int, dict[str, Any]], silent: dict[int, float] | None = None) -> Leader:
    leader = Leader.__new__(Leader)
    heard = SimpleNamespace(heard=lambda rank: said[rank], silent_s=lambda rank: (silent or {}).get(rank, 0.0))
    leader.__dict__.update(_board=heard, _others=sorted(said), _words=["x"], _worker=None, _limit_s=0.2, _setting="hydra.run.dir")
    return leader


def test_the_likeliest_cause_of_ranks_that_are_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    ranks = RankFiles.__new__(RankFiles)
    ranks.world, ranks.folder, ranks.run_dir = 4, tmp_path / "ranks", tmp_path
    launcher = {"host": "b", "gone": "stopped by SIGTERM: its launcher, process 7, has ended"}
    stopped, killed, failed = {"host": "b", "gone": "stopped by SIGTERM"}, {"exit": -9}, {"exit": 1}

    def told(silent: dict[int, float] | None = None, **said: dict[str, Any]) -> str:
        numbered = {int(name[1:]): words for name, words in said.items()}
        return str(leader_that_heard(numbered, silent)._over(ranks))

    assert told(r1={}, r2={"exit": 0}) == "None"
    assert told(r1=stopped, r2=launcher, r3=killed).startswith("worker 2 failed: stopped by SIGTERM: its launcher, process 7")
    assert told(r1=stopped, r2=killed, r3=failed).startswith("worker 2 failed: killed by SIGKILL; the kernel does that")
    (ranks.folder / "rank_3.log").write_text("sys.exit: no such file")
    assert told(r1=stopped, r3=failed) == "worker 3 failed: exit code 1"
    assert told({3: 21.0}, r1=stopped, r3={"host": "c"}).startswith("worker 3 failed: c gives no sign of life for 21 s")
    # A rank's own report says more than its exit code, and than what its failure did to others.
    (ranks.folder / "rank_3.error.json").write_text(json.dumps({"kind": "error"}))
    assert told(r1=stopped, r3=failed) == "None"
    assert "launcher" in told(r1=launcher, r3=failed)


def test_who_does_not_come_and_who_was_started_with_other_words_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"ranks 2, 3 have not come"):
        leader_that_heard({1: {"sees": True}, 2: {}, 3: {}})._wait("sees", "have not come")
    with pytest.raises(WorkerFailed, match=r"worker 2 .* other words \(x=2\) than rank 0 \(x\)"):
        leader_that_heard({1: {"words": ["x"]}, 2: {"words": ["x=2"]}})._check_words()


def test_what_needs_a_common_folder_is_refused_where_there_is_none(tmp_path: Path) -> None:
    leader = leader_that_heard({1: {"host": "b"}})
    for field, settings in (("checkpoint.every", (3, None)), ("resume", (0, "x"))):
        job: Any = SimpleNamespace(settings=SimpleNamespace(checkpoint_every=settings[0], resume=settings[1]))
        with pytest.raises(InvalidConfig, match=rf"{field}=.*rank 1 on b does not see"):
            leader._refuse_apart(job, 1, tmp_path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alone(world: int) -> dict[str, str]:
    """The environment of rank 0 of some processes the others of which never come."""
    port = str(free_port())
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize(
    ("words", "world", "says"),
    thinned(
        [
            (
                ["engine.launch=env", "cluster.num_devices=3"],
                2,
                "cluster.num_devices=3: .*2 were started.* start 3 processes.* or set it to 2",
            ),
            (["engine.launch=env", "cluster=local_4"], 2, "cluster.num_devices=4: "),
            # Nothing names a number: WORLD_SIZE is it, and what comes next is refused.
            (["engine.launch=env", "minibatch_size=1000000"], 2, "minibatch_size=1000000: must be at most"),
            (["engine.launch=env", "-m", "seed=0,1"], 2, r"engine.launch=env: .*a sweep \(-m\) is many"),
            (["engine.launch=env", "engine.interface=gpp9"], 2, "engine.interface=gpp9: .*no such network interface"),
            ([], 2, "RANK='?0'?: is set by a launcher.* add engine.launch=env"),
            (["-m", "seed=0,1"], 2, "RANK='?0'?: is set by a launcher"),
            (["engine=simulate"], 2, "RANK='?0'?: is set by a launcher"),
        ],
        3,
    ),
)
def test_a_start_that_does_not_fit_is_refused_before_anything_is_planned(
    tmp_path: Path, words: list[str], world: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in alone(world).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("gpp.runtime.controller.leader.LEAVE_S", 0.0)  # nobody comes
    flags, folder = (["-m"], "sweep") if "-m" in words else ([], "run")
    words = [*flags, "logger=none", "cost=analytical", *(word for word in words if word != "-m")]
    code, out = answered([*words, f"hydra.{folder}.dir={tmp_path}/run"], check_only, monkeypatch)
    assert (code, bool(re.search(says, " ".join(out.split())))) == (2, True), out
    assert not (tmp_path / "run" / "job").exists()


def test_without_a_launcher_it_is_refused_with_the_variables_name(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "logger=none", "engine.launch=env")
    assert (done.code, "neither RANK (torchrun) nor SLURM_PROCID (srun) is set" in done.out) == (2, True)


def test_mode_plan_under_a_launcher_plans_for_as_many_as_were_started(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "logger=none", "cost=analytical", "mode=plan", "explain_s=0", "engine.launch=env", **alone(3))
    assert done.code == 0, done.out
    assert done.result["plan"]["num_devices"] == 3 if "num_devices" in done.result["plan"] else "on 3 devices" in done.out


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Machine, Machine]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_machines() as found:
        yield found


def started(machine: Machine, words: list[str], env: dict[str, str], *, mount: tuple[Path, Path] | None = None) -> Any:
    """A command on a machine, with a folder of its own in another's place."""
    words = [sys.executable, *words]
    if mount:
        words = ["sh", "-c", f'mount --bind {mount[0]} {mount[1]}; exec "$@"', "sh", *words]
    return subprocess.Popen(
        ["ip", "netns", "exec", machine.name, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(processes: list[subprocess.Popen[str]], limit_s: float) -> list[str]:
    try:
        return [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


HERE = ["engine.launch=env", "engine.interface=gpp0", "strategy.planner.replication=false"]


@pytest.mark.long
@pytest.mark.dist
def test_machines_without_a_common_folder_train_to_the_losses_and_weights_of_one(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """srun's variables; the second machine has a disk of its own."""
    for name in ("shown", "other"):
        (tmp_path / name).mkdir()
    run_dir = tmp_path / "shown" / "run"
    words = ["run.py", *COMMON, "model=digits", *HERE, f"hydra.run.dir={run_dir}"]
    slurm = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "10.83.0.[1-2]"}
    processes = [
        started(
            pair[rank],
            words,
            {**slurm, "SLURM_PROCID": str(rank)},
            mount=(tmp_path / "other", tmp_path / "shown") if rank else None,
        )
        for rank in range(2)
    ]
    heard = set[str]()
    while all(process.poll() is None for process in processes) and not (run_dir / "ranks" / "device_0.json").exists():
        # Before its first file it may still be on its way into the namespace.
        heard |= {address for address, _ in listening(processes[0].pid)} if run_dir.exists() else set()
        time.sleep(0.2)
    said = ended(processes, 300.0)
    assert [process.returncode for process in processes] == [0, 0], said
    # The store and the workers, each on the named interface alone.
    assert heard == {pair[0].address}
    assert "rank 1 on" in said[0] and "it gets the job by the network" in said[0]
    check_against_one_device(Finished(0, said[0], run_dir), "digits")
    theirs = tmp_path / "other" / "run"
    for name in ("settings.json", "program.txt", "weights.safetensors"):
        assert (theirs / "job" / name).read_bytes() == (run_dir / "job" / name).read_bytes()
    assert not (theirs / "result.json").exists() and not (theirs / "report.html").exists()
    assert not (theirs / ".lock").exists()


def train(folder: str) -> None:
    """What each rank of one's own program does."""
    rank, engine = int(os.environ["SLURM_PROCID"]), gpp.Distributed(launch="env", interface="gpp0")
    settings = {"run": gpp.Run(engine=engine), "optimizer": gpp.ByFactory(factory=decayed, clip_norm=0.5)}
    with pipeline_of(model_of(), Path(folder, "run"), **settings) as pipeline:
        losses = [float(pipeline.step(inputs, targets)) for inputs, targets in batches(2)]
    Path(folder, f"losses_{rank}.json").write_text(json.dumps(losses))


@pytest.mark.long
@pytest.mark.dist
def test_ones_own_program_gets_the_job_on_machines_without_a_common_folder(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    for name in ("shown", "other"):
        (tmp_path / name).mkdir()
    code = f"from tests.runtime.test_start_anywhere import train\nif __name__ == '__main__': train({str(tmp_path / 'shown')!r})"
    slurm = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "10.83.0.[1-2]"}
    mounts = (None, (tmp_path / "other", tmp_path / "shown"))
    processes = [started(pair[rank], ["-c", code], {**slurm, "SLURM_PROCID": str(rank)}, mount=mounts[rank]) for rank in range(2)]
    said = ended(processes, 300.0)
    assert [process.returncode for process in processes] == [0, 0], said
    expected = plain_losses(model_of(), torch.nn.CrossEntropyLoss(), batches(2))
    for folder, rank in (("shown", 0), ("other", 1)):
        assert json.loads((tmp_path / folder / f"losses_{rank}.json").read_text()) == pytest.approx(expected, rel=1e-6)
    names = [path.name for path in (tmp_path / "shown" / "run" / "job").iterdir()]
    assert "weights.safetensors" in names
    for name in names:
        assert (tmp_path / "other" / "run" / "job" / name).read_bytes() == (tmp_path / "shown" / "run" / "job" / name).read_bytes()


@pytest.mark.long
@pytest.mark.dist
def test_the_end_of_one_machines_launcher_ends_both_with_the_cause(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Plain torchrun with the same command on both; the second one's agent is killed."""
    run_dir = tmp_path / "run"
    words = ["run.py", *COMMON[:-3], "minibatch_size=48", "microbatch_size=8", "steps=1000000", *HERE, f"hydra.run.dir={run_dir}"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", pair[0].address]
    agents = [started(machine, [*torchrun, "--node-rank", str(i), *words], {}) for i, machine in enumerate(pair)]
    logs = [run_dir / "ranks" / f"rank_{rank}.jsonl" for rank in (0, 1)]
    try:
        until(lambda: all(log.exists() and log.read_bytes().count(b"\n") > 3 for log in logs), 120.0)
    except AssertionError:
        pytest.fail("\n".join(ended(agents, 0.1)))
    os.kill(agents[1].pid, signal.SIGKILL)
    began = time.monotonic()
    said = ended(agents, 40.0)
    assert time.monotonic() - began < 30.0
    assert agents[0].returncode == 1, said[0]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"].startswith(
        f"worker 1 failed: stopped by SIGTERM: its launcher, process {agents[1].pid}, has ended (on {socket.gethostname()})"
    )
    assert (run_dir / "report.html").exists()
    until(lambda: not workers_of(run_dir), 10.0)
