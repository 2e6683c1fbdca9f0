"""Walks one device's list of actions: one handler for each kind, and a clock around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from gpp.errors import MalformedProgram
from gpp.program.kinds import COMPUTE, FORWARD, KINDS, RECEIVES, SENDS, UPDATES, Kind, Role
from gpp.program.program import Action
from gpp.runtime.hang_detection.status import AbstractStatus, NoStatus
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.mailbox import AbstractMailbox
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


Handler = Callable[[Action, bool], "int | Span | None"]


class _Handlers(dict[str, Handler]):
    """Who runs the actions of a kind, by its text; found once for each kind."""

    def __init__(self, find: Callable[[Kind], Handler]) -> None:
        self._find = find

    def __missing__(self, text: str) -> Handler:
        self[text] = self._find(KINDS[text])
        return self[text]


class Interpreter(Generic[R]):
    """Runs a device's actions of one program.

    Args:
        runners: stage -> its runner, for the stages of this device.
        mailboxes: stage -> its messages.
        update: (stage, mini-batch of the list) -> its optimizer step.
        updated: called after each optimizer step, when its event is recorded.
        pending_limit: sends under way at a time; None for no limit.
        status: is told every action, and every wait for others.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        runners: Mapping[int, R],
        mailboxes: Mapping[int, AbstractMailbox],
        transport: AbstractTransport,
        *,
        device_id: int,
        gradients: Sums | None = None,
        update: Callable[[int, int], None] = lambda stage, minibatch: None,
        updated: Callable[[int, int], None] | None = None,
        pending_limit: int | None = None,
        status: AbstractStatus | None = None,
    ) -> None:
        self.runners, self.mailboxes, self.transport = runners, mailboxes, transport
        self.device_id, self.update = device_id, update
        self.gradients, self.pending_limit, self.updated = gradients, pending_limit, updated
        self.events: list[Event] = []
        self.waited_s = 0.0
        self.status = status or NoStatus()
        self.actions = list(_flagged(actions))
        self.handlers = _Handlers(self._handler)

    def run(self, actions: Iterable[Action] | None = None) -> None:
        """Run the list once, or `actions` in its place: a stretch of another length.

        `events` then holds what the device did, waiting excluded, and `waited_s` how long it waited for messages
        and for the other members of reductions; both since the last `take`.
        """
        self.take()
        clock, device, handlers = time.perf_counter, self.device_id, self.handlers
        at, index = self.status.at, -1
        for index, (action, last) in enumerate(self.actions if actions is None else _flagged(actions)):
            at(index)
            kind = action.kind
            if kind in COMPUTE:
                span = handlers[kind](action, last)
                if isinstance(span, tuple):
                    self.events.append(Event(device, kind, action.stage, action.microbatch, *span))
                continue
            start = clock()
            num_bytes = handlers[kind](action, last)
            if kind not in RECEIVES and isinstance(num_bytes, int):
                self.events.append(Event(device, kind, action.stage, action.microbatch, start, clock(), num_bytes))
            if kind in UPDATES and self.updated:
                self.updated(action.stage, action.microbatch)
        at(index + 1)
        self._wait(self.transport.flush)

    def _handler(self, kind: Kind) -> Handler:
        """Who runs actions of a kind.

        Raises:
            MalformedProgram: nobody.
        """
        if kind.role is Role.SUM:
            return self._norm if kind.everyone else self._reduce
        found: dict[Role, Handler] = {
            Role.COMPUTE: self._compute,
            Role.RECEIVE: self._receive,
            Role.SEND: self._send,
            Role.UPDATE: self._update,
        }
        if not kind.own or kind.role not in found:
            raise MalformedProgram(f"no worker runs actions of kind {kind.text} ({kind.meaning})")
        return found[kind.role]

    def take(self) -> tuple[list[Event], float]:
        """Events and seconds waited since the last call."""
        found = self.events, self.waited_s
        self.events, self.waited_s = [], 0.0
        return found

    def _compute(self, action: Action, last: bool) -> Span | None:
        runner, direction = self.runners[action.stage], KINDS[action.kind].direction
        self._wait(self.mailboxes[action.stage].arrive, direction, action.microbatch)
        return runner.forward(action.microbatch) if direction == FORWARD else runner.backward(action.microbatch)

    def _receive(self, action: Action, last: bool) -> None:
        kind, stage, microbatch, peer_stage, peer_device, lo, hi = action
        self.mailboxes[stage].post(KINDS[kind].direction, microbatch, peer_stage, peer_device, lo, hi)

    def _send(self, action: Action, last: bool) -> int | None:
        if self.pending_limit is not None:
            self.status.waiting(True)
            self.transport.flush(self.pending_limit)
            self.status.waiting(False)
        kind, stage, microbatch, peer_stage, peer_device, lo, hi = action
        # Nothing was sent if it was handed over in memory.
        return self.mailboxes[stage].send(KINDS[kind].direction, microbatch, peer_stage, peer_device, lo, hi, last) or None

    def _reduce(self, action: Action, last: bool) -> int:
        assert self.gradients is not None
        return self._wait(self.gradients.reduce, action.microbatch)

    def _norm(self, action: Action, last: bool) -> int:
        assert self.gradients is not None
        return self._wait(self.gradients.clip)

    def _wait(self, call: Callable[..., T], *args: object) -> T:
        """Make a call that waits for other devices: the status says so meanwhile, and `waited_s` grows by its time."""
        self.status.waiting(True)
        start = time.perf_counter()
        out = call(*args)
        self.waited_s += time.perf_counter() - start
        self.status.waiting(False)
        return out

    def _update(self, action: Action, last: bool) -> int:
        self.update(action.stage, action.microbatch)
        return 0


def _flagged(actions: Iterable[Action]) -> Iterator[tuple[Action, bool]]:
    """Each action, and whether it is the last send of a compute action's tensors, which frees them.

    Those sends follow the action at once, so a look at the next one tells.
    """
    before: Action | None = None
    for action in actions:
        if before is not None:
            yield before, before.kind in SENDS and before[:3] != action[:3]
        before = action
    if before is not None:
        yield before, before.kind in SENDS
