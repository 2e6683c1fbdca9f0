"""Whether a run still moves: successive looks at all ranks, by the controller or by each worker.

A run hangs when no rank has moved for `timeout_s` and none computes, or when one cannot run at all (stopped, or not
heard of). A rank that does not wait and uses processor time computes, however long; loading, connecting and writing
a checkpoint have a limit of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gpp.program.program import Program, teams
from gpp.program.steady_state import of_length
from gpp.runtime.hang_detection.diagnosis import Diagnosis, Programs, Sight, diagnose
from gpp.runtime.hang_detection.status import (
    CHECKPOINT,
    ENDED,
    PHASES,
    RESTING,
    SILENT,
    STARTING,
    RankState,
    read_state,
    status_path,
)
from gpp.runtime.job import Job
from gpp.runtime.stretches import stretch_at

MAX_GAP_S = 1.0
"""Most seconds that count between two looks: whoever looks may have been stopped itself."""

BUSY_SHARE = 0.01
"""Least share of a processor that a rank uses when it computes."""


class Look(NamedTuple):
    """One rank at one time.

    `stopped` says why it cannot run, if that is seen; `cpu_s` is the processor time that it has used so far; `runs`,
    that it asks for a processor right now, whether it gets one or not.
    """

    state: RankState | None
    stopped: str | None = None
    cpu_s: float = 0.0
    runs: bool = False


@dataclass(slots=True)
class _RankLooks:
    """Sums over successive looks at a rank, in seconds."""

    key: object = None
    beat: int = 0
    quiet_s: float = 0.0
    stopped_s: float = 0.0
    silent_s: float = 0.0
    idle_s: float = 0.0
    mark_s: float = 0.0
    mark_cpu_s: float = 0.0
    ran: bool = False

    def update(self, look: Look, now_s: float, gap_s: float, slice_s: float) -> None:
        state = look.state
        key = state and (state.phase, state.runs, state.index, state.waiting)
        self.quiet_s = self.quiet_s + gap_s if key == self.key else 0.0
        self.stopped_s = self.stopped_s + gap_s if look.stopped else 0.0
        beat = state.beat_ns if state else 0
        self.silent_s = self.silent_s + gap_s if beat == self.beat else 0.0
        self.key, self.beat = key, beat
        self.ran = self.ran or look.runs
        past_s = now_s - self.mark_s
        if past_s >= slice_s:
            # Two ticks of the kernel's clock at least: one is what rounding makes of nothing.
            busy = self.ran or look.cpu_s - self.mark_cpu_s >= max(0.02, BUSY_SHARE * past_s)
            self.idle_s = 0.0 if busy else self.idle_s + min(past_s, slice_s + MAX_GAP_S)
            self.mark_s, self.mark_cpu_s, self.ran = now_s, look.cpu_s, False


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """Judges a run.

    Args:
        timeout_s: for how long no rank may move, or one be stopped.
        startup_timeout_s: the limit for loading and connecting, and for writing a checkpoint.
        heard: whether a rank whose sign of life stays away is as good as stopped; of no use where its process is seen.
        cpu_counts: whether processor time means computing; it does not where a thread spins to wait for a GPU.
    """

    programs: Programs
    timeout_s: float
    startup_timeout_s: float
    heard: bool = False
    cpu_counts: bool = True
    _last_s: float | None = None
    _seen: dict[int, _RankLooks] = field(default_factory=dict)

    def turn(self, job: Job) -> None:
        """All ranks run the programs of another job from now on."""
        self.programs = _programs(job)

    def look(self, now_s: float, looks: Mapping[int, Look]) -> Diagnosis | None:
        """Take in a look at all ranks at `now_s` (any clock that does not go back); a diagnosis if the run hangs."""
        gap_s = min(now_s - self._last_s, MAX_GAP_S) if self._last_s is not None else 0.0
        self._last_s = now_s
        slice_s = min(max(self.timeout_s / 10, 0.2), 10.0)
        for rank, look in looks.items():
            if rank not in self._seen:
                self._seen[rank] = _RankLooks(mark_s=now_s, mark_cpu_s=look.cpu_s)
            self._seen[rank].update(look, now_s, gap_s, slice_s)
        going = [rank for rank, look in looks.items() if look.state is None or look.state.phase != ENDED]
        missed = any(self._seen[rank].silent_s >= self.timeout_s for rank in going)
        out = {rank: why for rank in going if (why := self._out(looks[rank], self._seen[rank], missed))}
        if not out and not (going and all(self._frozen(looks[rank].state, self._seen[rank]) for rank in going)):
            return None
        if not out and all((state := looks[rank].state) and state.phase == RESTING for rank in going):
            return None  # their programs have better things to do
        sights = {
            rank: Sight(
                state=look.state,
                out=out.get(rank),
                quiet_s=self._seen[rank].quiet_s,
                idle=not self.cpu_counts or self._seen[rank].idle_s > 0,
            )
            for rank, look in looks.items()
        }
        return diagnose(self.programs, sights)

    def _out(self, look: Look, seen: _RankLooks, missed: bool) -> str | None:
        """Why a rank cannot run, if it cannot; `missed` says whether any rank has not been heard of."""
        phase = look.state.phase if look.state else STARTING
        if look.stopped and seen.stopped_s >= self.timeout_s:
            return look.stopped
        # Whoever fell silent with the first one to be missed is out as well, if a moment less long.
        if self.heard and look.state and seen.silent_s >= (self.timeout_s / 2 if missed else self.timeout_s):
            return f"not heard of for {seen.silent_s:.1f} s (stopped, killed or cut off)"
        if phase in (STARTING, CHECKPOINT) and seen.quiet_s >= self.startup_timeout_s:
            name = "importing" if look.state is None else PHASES[phase]
            return f"{name} for longer than engine.startup_timeout_s"
        return None

    def _frozen(self, state: RankState | None, seen: _RankLooks) -> bool:
        if state is None or state.phase in (STARTING, CHECKPOINT):
            return False
        if state.phase in (SILENT, RESTING):
            # Where it is, is not known; that it does nothing at all can be seen.
            return self.cpu_counts and seen.idle_s >= self.timeout_s
        idle = state.waiting or not self.cpu_counts or seen.idle_s >= self.timeout_s
        return seen.quiet_s >= self.timeout_s and idle


def _stretch(job: Job) -> Callable[[int], Program] | None:
    """The program of the stretch that a step is in, where stretches are longer or shorter than the program.

    Emulated devices (whose engine has settings of its own) run the program as it stands.
    """
    if not job.streams or job.settings.engine:
        return None

    @cache
    def program(count: int) -> Program:
        actions = {device: tuple(of_length(job.program, job.plan, device, count)) for device in job.program.actions}
        return Program(num_samples=count * job.plan.minibatch_size, actions=actions, minibatches=count)

    return lambda step: program(stretch_at(job, step)[1])


def _programs(job: Job) -> Programs:
    return Programs(sorted(job.program.actions), job.program, job.evaluation, _stretch(job), teams(job.plan), job.settings.course)


def watch_of(job: Job, *, heard: bool = False) -> HangWatch:
    """The watch over a job's ranks, one a device of the program."""
    return HangWatch(
        programs=_programs(job),
        timeout_s=job.settings.timeout_s,
        startup_timeout_s=job.settings.startup_timeout_s,
        heard=heard,
        cpu_counts=job.settings.device_kind == "cpu",
    )


class Process(NamedTuple):
    """A process as the kernel describes it: one letter, and processor seconds of all its threads."""

    letter: str
    cpu_s: float


def process(pid: int) -> Process | None:
    """A process of this machine; None if there is no such one (any more)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"))


def said_pids(ranks: Path, world: int) -> dict[int, int]:
    """rank -> process, of those that have said so: for workers that were not started one by one."""
    states = {rank: read_state(status_path(ranks, rank)) for rank in range(world)}
    return {rank: state.pid for rank, state in states.items() if state and state.pid}


@dataclass(slots=True, kw_only=True)
class LocalWatch:
    """The controller's look at workers of its own machine.

    Args:
        pids: rank -> process.
    """

    watch: HangWatch
    ranks: Path
    pids: Mapping[int, int]
    _next_s: float = 0.0

    def poll(self, now_s: float) -> Diagnosis | None:
        """Look, unless the last look was a moment ago."""
        if now_s < self._next_s:
            return None
        self._next_s = now_s + min(0.25, self.watch.timeout_s / 20)
        looks = {}
        for rank, pid in self.pids.items():
            found = process(pid)
            stopped = "stopped by a signal (SIGSTOP or SIGTSTP)" if found and found.letter == "T" else None
            state, cpu_s = read_state(status_path(self.ranks, rank)), found.cpu_s if found else 0.0
            looks[rank] = Look(state, stopped, cpu_s, found is not None and found.letter == "R")
        return self.watch.look(now_s, looks)

    def kill(self, ranks: Iterable[int]) -> None:
        """End workers that no gentler signal reaches: a stopped process takes none."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)
