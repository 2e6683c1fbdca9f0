"""The walk over one device's list of actions: one handler for each kind, and a clock around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpp.errors import MalformedProgram
from gpp.program.kinds import (
    BACKWARD,
    COMPUTE,
    COPIES,
    FORWARD,
    KINDS,
    PASS,
    RECEIVES,
    REDUCE,
    SENDS,
    UPDATES,
    Action,
    Kind,
    Role,
)
from gpp.runtime.transport.channels import Mark
from gpp.runtime.worker.clock import Timed
from gpp.runtime.worker.mailbox import AbstractMailbox
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.stage import Span
from gpp.timeline import Event


class Runner(Protocol):
    """A stage on a device, as the interpreter sees it; `gpp.runtime.worker.stage.StageRunner` has the contract."""

    def forward(self, microbatch: int) -> Span | None: ...
    def backward(self, microbatch: int) -> Span | None: ...


class Sums(Protocol):
    """Sums over devices before the update; `gpp.runtime.worker.gradients.Gradients` has the contract."""

    def reduce(self, group: int) -> int: ...
    def clip(self) -> int: ...


R = TypeVar("R", bound=Runner)
T = TypeVar("T")


class _Handler(NamedTuple):
    """The handler of a kind: how its actions are run.

    Args:
        call: runs one; returns what its event says, None for no event.
        spans: whether that is when it began and ended; otherwise it is the bytes that it moved, and it is timed around the call.
        receives: whether an action is over at once, and has no event.
        travels: whether the transport carries it out, and may go on after the call.
        updates: whether an action is an optimizer's step.
    """

    call: Callable[[Action, bool], int | Span | None]
    spans: bool
    receives: bool
    travels: bool
    updates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BesidePasses:
    """What a device does in a program beside plain passes and messages.

    Args:
        sums: over devices, before the update.
        update: (stage, mini-batch of the list) -> its optimizer step.
        updated: called after each optimizer step, when its event is recorded.
        arm: called before a pass that the sums of gradient groups follow at once, with the groups.
        issued: called when the last action has been issued, before the wait for what goes on.
        own: kind of a mechanism -> how its actions are run, by stage and micro-batch.
    """

    sums: Sums | None = None
    update: Callable[[int, int], None] = lambda stage, minibatch: None
    updated: Callable[[int, int], None] | None = None
    arm: Callable[[Sequence[int]], None] | None = None
    issued: Callable[[], None] | None = None
    own: Mapping[str, Callable[[int, int], Span | None]] = field(default_factory=dict)


class Interpreter(Generic[R]):
    """Runs a device's actions of one program.

    Args:
        runners: stage -> its runner, for the stages of this device.
        mailboxes: stage -> its messages.
        pending_limit: sends under way at a time; None for no limit.
        slower: how often longer passes are to take than they do, for a device that is slower than this processor.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        runners: Mapping[int, R],
        mailboxes: Mapping[int, AbstractMailbox],
        seat: Seat,
        beside: BesidePasses | None = None,
        *,
        pending_limit: int | None = None,
        slower: float = 1.0,
    ) -> None:
        beside = beside or BesidePasses()
        self._slower = slower
        self._runs: dict[str, Callable[[int, int], Span | None]] = {
            PASS[FORWARD]: lambda stage, microbatch: runners[stage].forward(microbatch),
            PASS[BACKWARD]: lambda stage, microbatch: runners[stage].backward(microbatch),
            **beside.own,
        }
        self.runners, self.mailboxes, self.pending_limit, self.beside = runners, mailboxes, pending_limit, beside
        self.device_id, self.transport, self.status, self.clock = seat.device_id, seat.transport, seat.status, seat.clock
        self._timed: list[Timed] = []
        self._waits: list[tuple[Mark, Mark]] = []
        self._handler_of = cache(self._handler)
        self.actions = list(self._handled(actions))
        self._summed = _summed([action for action, _, _ in self.actions]) if beside.arm else {}

    def run(self, actions: Iterable[Action] | None = None, *, ends: bool = True) -> None:
        """Run the list once, or `actions` in its place: a stretch of another length.

        `take` then gives what the device did.

        Args:
            ends: whether what is under way is waited for at the end; False where more of a stream follows.
        """
        self._timed, self._waits = [], []
        now, finished, device, timed = self.clock.now, self.transport.finished, self.device_id, self._timed
        at, index = self.status.at, -1
        for index, (action, last, handler) in enumerate(self.actions if actions is None else self._handled(actions)):
            at(index)
            kind, stage, microbatch, *_ = action
            call, spans, receives, travels, updates = handler
            if spans:
                span = call(action, last)
                if isinstance(span, tuple):
                    timed.append((device, kind, stage, microbatch, *span, 0))
            elif receives:
                call(action, last)
            else:
                start = now()
                num_bytes = call(action, last)
                if isinstance(num_bytes, int):
                    timed.append((device, kind, stage, microbatch, start, finished() if travels else now(), num_bytes))
                if updates and self.beside.updated:
                    self.beside.updated(stage, microbatch)
                    timed = self._timed
        at(index + 1)
        if self.beside.issued:
            self.beside.issued()
        if ends:
            self._wait(self._end)

    def _handled(self, actions: Iterable[Action]) -> Iterator[tuple[Action, bool, _Handler]]:
        """Each action, whether it is the last send of a compute action's tensors, and who runs it."""
        return ((action, last, self._handler_of(action.kind)) for action, last in _flagged(actions))

    def _handler(self, text: str) -> _Handler:
        call, travels = self._call_of(KINDS[text]), text in SENDS or text == REDUCE
        return _Handler(call, text in COMPUTE or text in COPIES, text in RECEIVES, travels, text in UPDATES)

    def _call_of(self, kind: Kind) -> Callable[[Action, bool], int | Span | None]:
        """What runs a kind's actions.

        Raises:
            MalformedProgram: nobody.
        """
        if kind.role is Role.SUM:
            return self._norm if kind.everyone else self._reduce
        if run := self._runs.get(kind.text):
            found = partial(self._run, kind.direction, run)
            return self._slowed(found) if self._slower > 1 and kind.computes else found
        if kind.role is Role.RECEIVE:
            return partial(self._receive, kind.direction)
        if kind.role is Role.SEND:
            return partial(self._send, kind.direction)
        if kind.role is Role.UPDATE:
            return self._update
        raise MalformedProgram(f"no worker runs actions of kind {kind.text} ({kind.meaning})")

    def _slowed(self, call: Callable[[Action, bool], Span | None]) -> Callable[[Action, bool], Span | None]:
        """A pass that takes as long as on the slower device; the processor is free for others meanwhile."""

        def slowed(action: Action, last: bool) -> Span | None:
            span = call(action, last)
            if span is None:
                return None
            start, end = span
            time.sleep((end - start) * (self._slower - 1.0))
            return start, self.clock.now()

        return slowed

    def take(self) -> tuple[list[Event], float]:
        """The events of the device since the last call, without waiting, and the seconds it waited for messages and sums."""
        events, self._timed = self.clock.events(self._timed)
        waited_s, self._waits = self.clock.total_s(self._waits), []
        return events, waited_s

    def _end(self) -> None:
        self.transport.flush()
        self.clock.settle()

    def _run(self, direction: str, run: Callable[[int, int], Span | None], action: Action, last: bool) -> Span | None:
        """Run a pass when its messages are there."""
        _, stage, microbatch, *_ = action
        if self.beside.arm and action in self._summed:
            self.beside.arm(self._summed[action])
        if direction:
            mailbox = self.mailboxes[stage]
            if mailbox.expects(direction, microbatch):
                self._wait(mailbox.arrive, direction, microbatch)
            else:
                mailbox.arrive(direction, microbatch)
        return run(stage, microbatch)

    def _receive(self, direction: str, action: Action, last: bool) -> None:
        _, stage, microbatch, peer_stage, peer_device, lo, hi = action
        self.mailboxes[stage].post(direction, microbatch, peer_stage, peer_device, lo, hi)

    def _send(self, direction: str, action: Action, last: bool) -> int | None:
        if self.pending_limit is not None:
            self.status.waiting(True)
            self.transport.flush(self.pending_limit)
            self.status.waiting(False)
        _, stage, microbatch, peer_stage, peer_device, lo, hi = action
        # Nothing was sent if it was handed over in memory.
        return self.mailboxes[stage].send(direction, microbatch, peer_stage, peer_device, lo, hi, last) or None

    def _reduce(self, action: Action, last: bool) -> int:
        assert self.beside.sums is not None
        return self._wait(self.beside.sums.reduce, action.microbatch)

    def _norm(self, action: Action, last: bool) -> int:
        assert self.beside.sums is not None
        return self._wait(self.beside.sums.clip)

    def _wait(self, call: Callable[..., T], *args: object) -> T:
        """Make a call that waits for other devices: the status says so meanwhile, and `waited_s` grows by its time."""
        self.status.waiting(True)
        start = self.clock.now()
        out = call(*args)
        self._waits.append((start, self.clock.now()))
        self.status.waiting(False)
        return out

    def _update(self, action: Action, last: bool) -> int:
        self.beside.update(action.stage, action.microbatch)
        return 0


def _summed(actions: Sequence[Action]) -> dict[Action, list[int]]:
    """Passes -> the gradient groups whose sums follow them at once."""
    out: dict[Action, list[int]] = {}
    latest: Action | None = None
    for action in actions:
        if action.kind == REDUCE and latest is not None:
            out.setdefault(latest, []).append(action.microbatch)
        else:
            latest = action if KINDS[action.kind].finishes else None
    return out


def _flagged(actions: Iterable[Action]) -> Iterator[tuple[Action, bool]]:
    """Each action, and whether it is the last send of a compute action's tensors, which frees them.

    Between two of those sends there may be receives and nothing else, so a look at the next other action tells.
    """
    held: list[Action] = []
    """A send, and the receives behind it."""
    for action in actions:
        if held:
            if action.kind in RECEIVES:
                held.append(action)
                continue
            yield held[0], held[0][:3] != action[:3]
            for receive in held[1:]:
                yield receive, False
            held = []
        if action.kind in SENDS:
            held.append(action)
        else:
            yield action, False
    for number, action in enumerate(held):
        yield action, not number
