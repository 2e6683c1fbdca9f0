"""Cause of a standstill: a walk on the program's graph of waits (`gpp.program.waits`).

A rank that waits at an action waits for the ranks that have yet to send what the action needs, or to come to the
same sum. Followed to its end, that leads to a rank that waits for nobody who is behind: it is the cause. Either it
does not run (stopped, cut off, blocked in an operator), or what it waits for was sent and has not arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpp.graph.captured import closure
from gpp.program.kinds import COMPUTE, SENDS, Action
from gpp.program.program import Program
from gpp.program.waits import Waits
from gpp.runtime.hang_detection.status import COURSE, ENDED, EVALUATION, FINISHING, MEETING, PHASES, SILENT, TRAINING, RankState
from gpp.runtime.job_asked import AbstractJobCourse


class Want(NamedTuple):
    """Something that a rank waits for."""

    rank: int
    """Who is to provide it."""
    action: str
    """By which action, as in the program."""
    sent: bool
    """Whether that action is behind the provider: then the message is on its way, or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The facts about one rank when a run stands still.

    Args:
        state: None where it has not said anything yet.
        out: why it cannot run, as in "stopped by a signal"; None where it may.
        quiet_s: for how long nothing of its state has changed.
        idle: whether it used no processor time either.
    """

    state: RankState | None
    out: str | None = None
    quiet_s: float = 0.0
    idle: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The rank that is the cause, why, and a line for each rank."""

    rank: int
    why: str
    lines: tuple[str, ...]
    out: tuple[int, ...] = ()
    """Ranks that cannot run."""

    @property
    def reason(self) -> str:
        return "\n".join([self.why, *self.lines])


class Programs:
    """The programs of a job, asked about waiting.

    Args:
        devices: rank -> device.
        evaluation: None where nothing is evaluated.
        stretch: step -> the program of the stretch of training steps that it is in, where it is not the program itself.
        teams: devices that meet in the midst of their passes (`gpp.program.program.teams`).
        course: what workers do in place of training steps, which says what a repetition of the program is called.
    """

    def __init__(
        self,
        devices: Sequence[int],
        training: Program,
        evaluation: Program | None = None,
        stretch: Callable[[int], Program] | None = None,
        teams: Sequence[tuple[int, ...]] = (),
        course: AbstractJobCourse | None = None,
    ) -> None:
        self.devices, self._stretch, self._teams = tuple(devices), stretch, tuple(teams)
        self._course = course
        self._rank = {device: rank for rank, device in enumerate(self.devices)}
        self._of = {TRAINING: training, EVALUATION: evaluation or training, COURSE: training}

    def program(self, state: RankState) -> Program | None:
        """The program that the phase of `state` runs; None in phases without one."""
        return self._stretch(state.step) if state.phase == TRAINING and self._stretch else self._of.get(state.phase)

    def actions(self, rank: int, state: RankState) -> tuple[Action, ...]:
        """A rank's list in the program that `state`, its own or another's, is in; empty in phases without one."""
        program = self.program(state)
        return program.actions.get(self.devices[rank], ()) if program else ()

    def where(self, rank: int, state: RankState | None) -> str:
        """Words for the place of a rank in its program."""
        if state is None:
            return "not started yet"
        actions = self.actions(rank, state)
        if not actions:
            return PHASES[state.phase]
        if state.phase == COURSE and self._course is not None:
            when = self._course.words(state.step)
        else:
            when = f"{'the evaluation after ' if state.phase == EVALUATION else ''}step {state.step}"
        if state.index >= len(actions):
            return f"at the end of {when}"
        return f"in {actions[state.index].text(self.devices[rank])} of {when}"

    def wants(self, rank: int, states: Sequence[RankState | None]) -> list[Want]:
        """What a rank waits for at its present action, what was sent already included."""
        state = states[rank]
        if state is None:
            return []
        if state.phase in (FINISHING, MEETING):
            late = [r for r, s in enumerate(states) if s is None or s.phase not in (state.phase, ENDED)]
            return [Want(r, "the end of its work", False) for r in late]
        program = self.program(state)
        if program is None or not self.actions(rank, state):
            return []
        waits, device = program.waits, self.devices[rank]
        first, count = waits.first[device], len(program.actions[device])
        if state.index >= count:
            return self._unread(range(first, first + count), waits, state, states)
        node = first + state.index
        kind = program.actions[device][state.index].kind
        if kind in COMPUTE:
            makers = [self._want(send, waits, state, states) for send in waits.needs.get(node, ())]
            makers += [self._want(mate, waits, state, states, there=True) for mate in self._mates(program, device, state)]
            return [want for want in makers if want.rank != rank]  # what is handed over inside the device is there
        if not state.waiting:
            return []
        if kind in SENDS:
            return self._unread(range(first, node + 1), waits, state, states)
        others = [member for member in waits.meetings.get(node, ()) if member != node]
        return sorted(self._want(member, waits, state, states, there=True) for member in others)

    def _mates(self, program: Program, device: int, state: RankState) -> list[int]:
        """The nodes of the same pass on the other devices of the replica, if it waits in the midst of it."""
        action, out = program.actions[device][state.index], list[int]()
        for team in self._teams if state.waiting else ():
            for mate in team if device in team else ():
                found = (i for i, other in enumerate(program.actions[mate]) if mate != device and other[:3] == action[:3])
                out += [program.waits.first[mate] + i for i in found]
        return out

    def _want(self, node: int, waits: Waits, state: RankState, states: Sequence[RankState | None], *, there: bool = False) -> Want:
        """A wait for an action of the program that `state` is in.

        Args:
            there: whether it is enough that its rank has come to it.
        """
        device, position = waits.place(node)
        rank = self._rank[device]
        reached = states[rank]
        past = reached is not None and (reached.runs, reached.index + there) > (state.runs, position)
        return Want(rank, waits.text(node), past)

    def _unread(self, nodes: Iterable[int], waits: Waits, state: RankState, states: Sequence[RankState | None]) -> list[Want]:
        """Who has not taken in yet what was sent: done with a message for certain is who has computed on it."""
        out = []
        for node in nodes:
            reader = waits.reader.get(node)
            if reader is not None and waits.place(reader)[0] != waits.place(node)[0]:
                want = self._want(reader, waits, state, states)
                out += [] if want.sent else [want]
        return list(dict.fromkeys(out))


def diagnose(programs: Programs, sights: Mapping[int, Sight]) -> Diagnosis:
    """The cause of a standstill, from what is known of every rank 0, 1, ..."""
    ranks = sorted(sights)
    states = [sights[rank].state for rank in ranks]
    wants = {rank: programs.wants(rank, states) for rank in ranks}
    behind = {rank: sorted({want.rank for want in wants[rank] if not want.sent}) for rank in ranks}
    lines = tuple(_line(programs, rank, sights[rank], wants[rank]) for rank in ranks)
    out = tuple(rank for rank in ranks if sights[rank].out)

    def first(candidates: Sequence[int]) -> int:
        """The one that most ranks wait for in the end."""
        reached = [closure([start], behind.__getitem__) for start in ranks]
        return max(candidates, key=lambda rank: (sum(rank in found for found in reached), -rank))

    if out:
        rank = first(out)
        others = [str(other) for other in out if other != rank]
        also = f", like rank{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
        why = f"{sights[rank].out}{also}, {programs.where(rank, states[rank])}"
        return Diagnosis(rank=rank, why=why, lines=lines, out=out)
    ends = [rank for rank in ranks if not behind[rank] and ((state := states[rank]) is None or state.phase != ENDED)]
    stuck = [rank for rank in ends if not _waits(states[rank])]
    if stuck:
        rank = first(stuck)
        why = f"does not go on, {programs.where(rank, states[rank])}: it waits for no other rank and uses no processor time"
        if all(state is None or state.phase == SILENT for state in states):
            why = "does not go on, nor does any other: none uses processor time, and workers of this kind do not say what they do"
        return Diagnosis(rank=rank, why=why, lines=lines)
    lost = Counter(want.rank for rank in ends for want in wants[rank])
    if lost:
        rank = max(lost, key=lambda r: (lost[r], -r))
        waiting = next(a for a in ends for want in wants[a] if want.rank == rank)
        # Which of several it is, the program cannot tell.
        sent = " or ".join(f"{want.action} of rank {want.rank}" for want in wants[waiting])
        why = f"the message of {sent} was sent and has not arrived at rank {waiting}: the connection between them is lost"
        return Diagnosis(rank=rank, why=why, lines=lines)
    rank = first(ranks)
    return Diagnosis(rank=rank, why=f"waits in a circle, {programs.where(rank, states[rank])}", lines=lines)


def _waits(state: RankState | None) -> bool:
    return state is not None and state.waiting


def _line(programs: Programs, rank: int, sight: Sight, wants: Sequence[Want]) -> str:
    where = programs.where(rank, sight.state)
    missing = [want for want in wants if not want.sent]
    waits = sight.state is not None and sight.state.waiting
    if sight.out:
        doing = sight.out
    elif missing:
        named = ", ".join(f"{want.action} of rank {want.rank}" for want in missing[:3])
        doing = f"waits for {named}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
    elif waits and wants:
        doing = f"waits for the message of {wants[0].action} of rank {wants[0].rank}, which was sent"
    elif waits:
        doing = "waits"
    else:
        doing = "does nothing" if sight.idle else "computes"
    state = sight.state
    place = f" ({state.host}, process {state.pid})" if state and state.host else ""
    return f"  rank {rank}{place} {where}: {doing}, for {sight.quiet_s:.1f} s"
