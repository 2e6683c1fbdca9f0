"""Cause of a standstill: the wait-for graph of the ranks, read off the program.

A rank that waits at an action waits for the ranks that have yet to send what the action needs, or to come to the
same sum. Followed to its end, that leads to a rank that waits for nobody who is behind: it is the cause. Either it
does not run (stopped, cut off, blocked in an operator), or what it waits for was sent and has not arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpp.program.program import COMPUTE, RECEIVES, SENDS, Action, Program, message_key
from gpp.runtime.hang_detection.status import ENDED, EVALUATION, FINISHING, PHASES, SILENT, TRAINING, RankState


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
    """What is known of one rank when a run stands still.

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
        passes: (device, step) -> its actions in the training pass of that step, where it is not the program itself.
    """

    def __init__(
        self,
        devices: Sequence[int],
        training: Program,
        evaluation: Program | None = None,
        passes: Callable[[int, int], tuple[Action, ...]] | None = None,
    ) -> None:
        self.devices, self._passes = tuple(devices), passes
        self._rank = {device: rank for rank, device in enumerate(self.devices)}
        self._of = {TRAINING: training, EVALUATION: evaluation or training}

    def actions(self, rank: int, state: RankState) -> tuple[Action, ...]:
        """A rank's list in the pass that `state`, its own or another's, is in; empty in phases without a program."""
        phase = state.phase
        if phase == TRAINING and self._passes:
            return self._passes(self.devices[rank], state.step)
        program = self._of.get(phase)
        return program.actions.get(self.devices[rank], ()) if program else ()

    def where(self, rank: int, state: RankState | None) -> str:
        """Where a rank is, in words."""
        if state is None:
            return "not started yet"
        actions = self.actions(rank, state)
        if not actions:
            return PHASES[state.phase]
        if state.index >= len(actions):
            return f"at the end of step {state.step}"
        passed = "" if state.phase == TRAINING else " of the evaluation after"
        return f"in {actions[state.index].text(self.devices[rank])}{passed or ' of'} step {state.step}"

    def wants(self, rank: int, states: Sequence[RankState | None]) -> list[Want]:
        """What a rank waits for at its present action, what was sent already included."""
        state = states[rank]
        if state is None:
            return []
        if state.phase == FINISHING:
            late = [r for r, s in enumerate(states) if s is None or s.phase not in (FINISHING, ENDED)]
            return [Want(r, "the end of its work", False) for r in late]
        actions = self.actions(rank, state)
        if not actions:
            return []
        if state.index >= len(actions):
            return self._unread(rank, state, actions, states)
        action = actions[state.index]
        if action.kind in COMPUTE:
            return self._messages(rank, state, action, actions, states)
        if action.kind in SENDS:
            return self._unread(rank, state, actions[: state.index + 1], states) if state.waiting else []
        if action.kind in RECEIVES or not state.waiting:
            return []
        return self._sum(rank, state, action, states)

    def _sends(self, rank: int, state: RankState) -> dict[object, int]:
        """Message -> position of the rank's action that sends it."""
        device = self.devices[rank]
        return {message_key(a, device): i for i, a in enumerate(self.actions(rank, state)) if a.kind in SENDS}

    @staticmethod
    def _past(state: RankState, other: RankState | None, index: int) -> bool:
        """Whether `other` has done the action at `index` of the pass that `state` is in."""
        return other is not None and (other.passes, other.index) > (state.passes, index)

    def _messages(
        self, rank: int, state: RankState, action: Action, actions: Sequence[Action], states: Sequence[RankState | None]
    ) -> list[Want]:
        device, direction = self.devices[rank], "F" if action.kind == "F" else "B"
        out = []
        for receive in actions:
            if receive.kind == f"R{direction}" and (receive.stage, receive.microbatch) == (action.stage, action.microbatch):
                sender = self._rank[receive.peer_device]
                if sender == rank:
                    continue  # handed over inside the device
                at = self._sends(sender, state)[message_key(receive, device)]
                text = self.actions(sender, state)[at].text(receive.peer_device)
                out.append(Want(sender, text, self._past(state, states[sender], at)))
        return out

    def _sum(self, rank: int, state: RankState, action: Action, states: Sequence[RankState | None]) -> list[Want]:
        """Members of a sum: all that have the same action as often, whatever their stage."""

        def places(actions: Sequence[Action]) -> list[int]:
            return [i for i, a in enumerate(actions) if (a.kind, a.microbatch) == (action.kind, action.microbatch)]

        out, time = [], places(self.actions(rank, state)).index(state.index)
        for other, device in enumerate(self.devices):
            theirs = self.actions(other, state)
            found = places(theirs) if other != rank else []
            if found:
                at, reached = found[time], states[other]
                there = reached is not None and (reached.passes, reached.index) >= (state.passes, at)
                out.append(Want(other, theirs[at].text(device), there))
        return out

    def _unread(self, rank: int, state: RankState, actions: Sequence[Action], states: Sequence[RankState | None]) -> list[Want]:
        """Who has not taken in yet what the rank sent: done with it for certain is who has computed on it."""
        device, out = self.devices[rank], []
        readers = {peer: self._readers(peer, state) for peer in range(len(self.devices))}
        for send in actions:
            if send.kind in SENDS and send.peer_device != device:
                peer = self._rank[send.peer_device]
                at = readers[peer][message_key(send, device)]
                if not self._past(state, states[peer], at):
                    out.append(Want(peer, self.actions(peer, state)[at].text(send.peer_device), False))
        return list(dict.fromkeys(out))

    def _readers(self, rank: int, state: RankState) -> dict[object, int]:
        """Message -> position of the rank's action that computes on it."""
        device, actions = self.devices[rank], self.actions(rank, state)
        computes = {(a.kind, a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind in COMPUTE}
        return {message_key(a, device): computes[a.kind[1], a.stage, a.microbatch] for a in actions if a.kind in RECEIVES}


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
        return max(candidates, key=lambda rank: (sum(rank in _reached(behind, start) for start in ranks), -rank))

    if out:
        rank = first(out)
        others = [str(other) for other in out if other != rank]
        also = f", like rank{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
        why = f"{sights[rank].out}{also}, {programs.where(rank, states[rank])}"
        return Diagnosis(rank=rank, why=why, lines=lines, out=out)
    ends = [rank for rank in ranks if not behind[rank] and (states[rank] is None or _unended(states[rank]))]
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


def _unended(state: RankState | None) -> bool:
    return state is not None and state.phase != ENDED


def _waits(state: RankState | None) -> bool:
    return state is not None and state.waiting


def _reached(edges: Mapping[int, Sequence[int]], start: int) -> set[int]:
    """Whoever `start` waits for, directly or through others, itself included."""
    seen, todo = {start}, [start]
    while todo:
        fresh = set(edges[todo.pop()]) - seen
        seen |= fresh
        todo += fresh
    return seen


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
