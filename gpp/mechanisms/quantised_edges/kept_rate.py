"""Bits that follow the speed of a link: what `strategy.edges.bits=auto` does while messages are sent.

The sender measures its link over a window of messages, and then takes the most bits with which the link keeps up. A receiver must
know the form of a message before it comes, and posts some of them ahead, so each message says how many bits a later one has: both
ends count `ahead` messages from the announcement to the change. Nothing here looks at a clock: the same times give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

from gpp.mechanisms.quantised_edges.sizes import most_bits


def announced(first: int, ahead: int) -> deque[int]:
    """The bits of the next messages of a channel, as both ends know them: each message takes the first, and adds what it announces.

    Args:
        first: of the messages before the first announcement.
        ahead: messages from an announcement to the one that it is about.
    """
    return deque([first] * ahead)


@final
class KeptRate:
    """The sender's end of a channel.

    Args:
        bytes_of: bits -> bytes of a message for each sample.
        first: bits in the beginning.
        ahead: as of `announced`.
        sample_s: seconds that the link may take for each sample that it carries.
        window: messages over which it is measured.
    """

    def __init__(self, bytes_of: Callable[[int], float], *, first: int, ahead: int, sample_s: float, window: int) -> None:
        self._bytes_of, self._sample_s, self._window = bytes_of, sample_s, window
        self._bits, self._next = first, announced(first, ahead)
        self._bytes, self._seconds, self._count = 0, 0.0, 0

    def note(self, num_bytes: int, seconds: float) -> None:
        """A message has left, for which the link took so long."""
        self._bytes, self._seconds, self._count = self._bytes + num_bytes, self._seconds + seconds, self._count + 1
        if self._count == self._window:
            # A link that takes no time has room for anything.
            rate = self._bytes / self._seconds if self._seconds else float("inf")
            self._bits = most_bits(self._bytes_of, rate * self._sample_s)
            self._bytes, self._seconds, self._count = 0, 0.0, 0

    def next(self) -> tuple[int, int]:
        """Bits of the next message, and those that it announces."""
        self._next.append(self._bits)
        return self._next.popleft(), self._bits
