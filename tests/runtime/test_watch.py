"""When a run counts as hanging, on a clock of the test's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpp.plan.build import make_plan
from gpp.runtime.hang_detection.diagnosis import Diagnosis, Programs
from gpp.runtime.hang_detection.status import (
    CHECKPOINT,
    ENDED,
    EVALUATION,
    SILENT,
    STARTING,
    TRAINING,
    RankState,
    Status,
    read_state,
)
from gpp.runtime.hang_detection.watch import HangWatch, Look, process
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support.graphs import chain, problem
from tests.support.programs import lower

TIMEOUT, STARTUP = 10.0, 100.0
WAITING = RankState(phase=TRAINING, runs=3, index=4, waiting=True)
COMPUTING = RankState(phase=TRAINING, runs=3, index=4)


def watch(**more: bool) -> HangWatch:
    prob = problem(chain(2), 2, 4)
    program = lower(make_plan(prob, "test", [(1, 1), (2, 1)], 2), prob.graph, OneFOneB())
    return HangWatch(programs=Programs((0, 1), program), timeout_s=TIMEOUT, startup_timeout_s=STARTUP, **more)


def until(of: HangWatch, looks: Callable[[float], dict[int, Look]], limit_s: float = 500.0) -> tuple[float, Diagnosis] | None:
    """When it speaks, and what it says; None if it says nothing up to `limit_s`."""
    for tick in range(int(limit_s * 4)):
        now = tick / 4
        if found := of.look(1000.0 + now, looks(now)):
            return now, found
    return None


def test_a_run_hangs_after_its_timeout() -> None:
    found = until(watch(), lambda now: {0: Look(WAITING), 1: Look(WAITING)})
    assert found
    assert TIMEOUT <= found[0] <= TIMEOUT + 1


def test_who_moves_or_computes_hangs_not() -> None:
    moving = lambda now: RankState(phase=TRAINING, runs=int(now / 9), index=4, waiting=True)  # noqa: E731
    assert until(watch(), lambda now: {0: Look(WAITING), 1: Look(moving(now))}) is None
    # Half a processor, in an operator that takes longer than the whole test.
    assert until(watch(), lambda now: {0: Look(WAITING), 1: Look(COMPUTING, None, now / 2)}) is None
    # Not a hundredth of one, on a machine that is busy with something else.
    assert until(watch(), lambda now: {0: Look(WAITING), 1: Look(COMPUTING, None, now / 1000, now % 1 == 0)}) is None
    # A thread that waits for a GPU spins: there, time means nothing.
    assert until(watch(cpu_counts=False), lambda now: {0: Look(WAITING), 1: Look(COMPUTING, None, now)})
    # One that waits computes nothing, whatever its other threads do.
    assert until(watch(), lambda now: {0: Look(WAITING, None, now), 1: Look(WAITING, None, now)})


def test_who_stops_computing_hangs() -> None:
    found = until(watch(), lambda now: {0: Look(WAITING), 1: Look(COMPUTING, None, min(now, 60.0))})
    assert found
    assert found[0] == pytest.approx(60 + TIMEOUT, abs=3)
    assert found[1].rank == 1


def test_a_stopped_rank_ends_the_run_though_others_compute() -> None:
    stopped = lambda now: "stopped by a signal" if now >= 20 else None  # noqa: E731
    found = until(watch(), lambda now: {0: Look(COMPUTING, None, now), 1: Look(COMPUTING, stopped(now), now)})
    assert found
    assert found[0] == pytest.approx(20 + TIMEOUT, abs=1)
    assert (found[1].rank, found[1].out) == (1, (1,))


@pytest.mark.parametrize("late", [None, RankState(phase=STARTING), RankState(phase=CHECKPOINT, runs=9)])
def test_loading_and_writing_have_their_own_limit(late: RankState | None) -> None:
    found = until(watch(), lambda now: {0: Look(WAITING), 1: Look(late)})
    assert found
    assert STARTUP <= found[0] <= STARTUP + 1
    assert found[1].rank == 1
    assert "startup_timeout_s" in found[1].why


def test_an_evaluation_that_moves_is_no_hang_and_one_that_stands_is() -> None:
    state = lambda now: RankState(phase=EVALUATION, runs=5, index=int(now), waiting=True)  # noqa: E731
    assert until(watch(), lambda now: {0: Look(state(now)), 1: Look(state(0))}) is None
    assert until(watch(), lambda now: {0: Look(state(0)), 1: Look(state(0))})


def test_workers_that_say_nothing_are_judged_by_what_they_use_and_those_that_ended_not_at_all() -> None:
    silent, ended = RankState(phase=SILENT), RankState(phase=ENDED, runs=9)
    assert until(watch(heard=True), lambda now: {0: Look(ended), 1: Look(ended)}) is None
    assert until(watch(), lambda now: {0: Look(silent, None, now / 5), 1: Look(silent)}) is None
    assert until(watch(cpu_counts=False), lambda now: {0: Look(silent), 1: Look(silent)}) is None
    found = until(watch(), lambda now: {0: Look(silent), 1: Look(silent)})
    assert found
    assert "do not say what they do" in found[1].why


def test_who_is_not_heard_of_is_out() -> None:
    alive = lambda now: RankState(phase=TRAINING, runs=int(now), beat_ns=int(now * 4) + 1)  # noqa: E731
    found = until(watch(heard=True), lambda now: {0: Look(alive(now)), 1: Look(alive(min(now, 30)))})
    assert found
    assert found[1].out == (1,)
    assert found[0] == pytest.approx(30 + TIMEOUT, abs=1)


def test_time_in_which_the_watch_itself_was_stopped_does_not_count() -> None:
    of, state = watch(), {0: Look(WAITING), 1: Look(WAITING)}
    assert of.look(0.0, state) is None
    assert of.look(1.0, state) is None
    assert of.look(500.0, state) is None


def test_a_status_reads_back_and_two_objects_are_one(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.status"
    assert read_state(path) is None
    first, second = Status(path), Status(path)
    second.begin(TRAINING, 17)
    second.at(23)
    second.waiting(True)
    state = read_state(path)
    assert state == RankState.decode(first.encode())
    assert state is not None
    assert (state.phase, state.runs, state.step, state.index, state.waiting) == (TRAINING, 1, 17, 23, True)
    assert process(state.pid) is not None
    first.enter(CHECKPOINT)
    state = read_state(path)
    # The index stays, so that the pass counts as done.
    assert state is not None
    assert (state.phase, state.index, state.waiting) == (CHECKPOINT, 23, False)


def test_the_kernel_says_who_is_stopped_and_who_computes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until_s = time.monotonic() + 20
        while (seen := process(child.pid)) and seen.cpu_s < 0.1 and time.monotonic() < until_s:
            time.sleep(0.02)
        assert seen
        assert seen.cpu_s >= 0.1
        os.kill(child.pid, signal.SIGSTOP)
        while (seen := process(child.pid)) and seen.letter != "T" and time.monotonic() < until_s:
            time.sleep(0.02)
        assert seen
        assert seen.letter == "T"
    finally:
        child.kill()
        child.wait()
    assert process(child.pid) is None
