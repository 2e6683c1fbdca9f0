"""The times at which operations begin and end: by the host's clock on a processor, by events in the stream on a card."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import final

from gpp.runtime.cards.card import AbstractCard, CardEvent
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.transport.channels import Mark
from gpp.timeline import Event

LOOK_S = 0.25
"""Seconds between two looks at how far a card has come."""

Timed = tuple[int, str, int, int, Mark, Mark, int]
"""An event of the timeline with marks in place of its start and end."""


class AbstractClock(ABC):
    """Gives marks, and says later when they were reached.

    `now` gives a mark behind everything that the worker has done, or has queued on the current stream.
    """

    now: Callable[[], Mark]

    @abstractmethod
    def settle(self) -> None:
        """Wait until all marks are reached."""

    @abstractmethod
    def events(self, timed: list[Timed]) -> tuple[list[Event], list[Timed]]:
        """The events whose marks are reached, with seconds of `time.perf_counter`; and the others, whose messages go on."""

    @abstractmethod
    def total_s(self, spans: Iterable[tuple[Mark, Mark]]) -> float:
        """Seconds of all the spans; their marks are reached."""


@final
class CopyMark:
    """The beginning (0) or the end (1) of a copy that a thread makes."""

    def __init__(self, way: Future[tuple[float, float]], end: int) -> None:
        self._way, self._end = way, end

    @property
    def time_s(self) -> float | None:
        """By the clock of the thread that made it; None before it is over."""
        return self._way.result()[self._end] if self._way.done() else None


@final
class HostClock(AbstractClock):
    """The processor does what the host calls, at once: a mark is a time, but for copies to the host, which threads make.

    Args:
        now: seconds; of `time.thread_time` they are those that the worker's own thread has computed.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def settle(self) -> None:
        return None

    def events(self, timed: list[Timed]) -> tuple[list[Event], list[Timed]]:
        new = tuple.__new__  # a third of the time of a named tuple's own constructor, and there are many
        found = [new(Event, event) for event in timed if type(event[5]) is float]
        if len(found) == len(timed):
            return found, []
        later = []
        for event in timed:
            if isinstance(event[5], CopyMark):
                start, end = event[4].time_s, event[5].time_s
                if end is None:
                    later.append(event)
                else:
                    found.append(Event(*event[:4], start, end, event[6]))
        return found, later

    def total_s(self, spans: Iterable[tuple[Mark, Mark]]) -> float:
        return sum([end - start for start, end in spans])


@final
class CardClock(AbstractClock):
    """The card works off what the host has queued: a mark is an event in a stream, and is read once a step.

    Seconds between two events of a card are good to a microsecond only over short times, so every step's marks are
    counted from the last one of the step before.
    """

    def __init__(self, card: AbstractCard) -> None:
        self._card = card
        self.now = self._now
        base = self._last = self._now()
        base.synchronize()
        self._base, self._base_s = base, time.perf_counter()

    def _now(self) -> CardEvent:
        event = self._last = self._card.event(timed=True)
        event.record()
        return event

    def settle(self) -> None:
        self._last.synchronize()

    def events(self, timed: list[Timed]) -> tuple[list[Event], list[Timed]]:
        found, later = [], []
        for event in timed:
            if event[5].query():
                found.append(Event(*event[:4], self._at_s(event[4]), self._at_s(event[5]), event[6]))
            else:
                later.append(event)
        last, self._base_s = self._last, self._at_s(self._last)
        self._base = last
        return found, later

    def total_s(self, spans: Iterable[tuple[Mark, Mark]]) -> float:
        return sum(self._card.seconds(start, end) for start, end in spans)

    def _at_s(self, mark: CardEvent) -> float:
        return self._base_s + self._card.seconds(self._base, mark)


@final
class CardStatus(AbstractStatus):
    """The status of a worker whose card is behind the host: its position is the action that the card has not finished.

    Args:
        status: where it is written.
    """

    def __init__(self, status: AbstractStatus, card: AbstractCard) -> None:
        super().__init__(status)
        self._card = card
        self._begun: deque[tuple[int, CardEvent]] = deque()
        # The host adds to the events while the thread takes those that are done.
        self._lock = threading.Lock()

    def at(self, index: int) -> None:
        event = self._card.event()
        event.record()
        with self._lock:
            self._begun.append((index, event))

    def look(self) -> None:
        """Write down how far the card has come."""
        with self._lock:
            reached = None
            while self._begun and self._begun[0][1].query():
                reached = self._begun.popleft()[0]
            if reached is not None:
                super().at(reached)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context in which a thread looks at the card."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_S):
                self.look()

        threading.Thread(target=follow, name="card", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def begin(self, phase: int, step: int) -> None:
        with self._lock:
            self._begun.clear()
            super().begin(phase, step)
