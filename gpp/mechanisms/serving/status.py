"""The status of a worker that answers requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

from gpp.mechanisms.serving.stream import places
from gpp.program.action import Action
from gpp.runtime.hang_detection.status import COURSE, AbstractStatus


@final
class StreamStatus(AbstractStatus):
    """Tells where in the program of one request a worker is, whose lists of actions are those of a stream.

    Args:
        status: that of the worker.
        actions, counts: as `gpp.mechanisms.serving.stream.stream_of` has them.
    """

    def __init__(self, status: AbstractStatus, actions: Sequence[Action], counts: Mapping[int, int]) -> None:
        self._status, self._actions, self._counts = status, actions, counts
        self._places: Sequence[int] = ()

    def told(self, requests: Iterable[list[Action]], first: int) -> Iterator[tuple[int, list[Action]]]:
        """Number and actions of each request, as its turn comes.

        Args:
            first: number of the first one; below 0 for those of the warm-up.
        """
        known = dict[int, list[int]]()
        for number, request in enumerate(requests, first):
            # The first one posts receives for others. Of the rest, those of one length are alike.
            if number == first:
                self._places = places(self._actions, request, self._counts)
            else:
                if len(request) not in known:
                    known[len(request)] = places(self._actions, request, self._counts)
                self._places = known[len(request)]
            self._status.begin(COURSE, number)
            yield number, request

    def at(self, index: int) -> None:
        self._status.at(self._places[index])

    def waiting(self, waits: bool) -> None:
        self._status.waiting(waits)

    def begin(self, phase: int, step: int) -> None:
        self._status.begin(phase, step)

    def enter(self, phase: int) -> None:
        self._status.enter(phase)
