"""The load of this machine by other programs while a measurement is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import final

_PROC = Path("/proc")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@final
class Load:
    """The share of this machine's processors that other programs take, from now on.

    Args:
        own: ids of the processes that do not count as others, beside this one.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = (os.getpid(), *own)
        self._begin, self._busy_s, self._own_s = time.perf_counter(), busy_s(), self._taken_s()

    def share(self) -> float:
        """Of the seconds that the processors have had since the beginning, the share that others computed; 0 where none can be
        told, as without /proc."""
        elapsed_s = (time.perf_counter() - self._begin) * (os.cpu_count() or 1)
        return others(busy_s() - self._busy_s, self._taken_s() - self._own_s, elapsed_s)

    def _taken_s(self) -> float:
        return sum(_process_s(pid) for pid in self._own)


def others(busy: float, own: float, whole: float) -> float:
    """The share of some seconds of all processors that others computed.

    Args:
        busy: seconds in which processors computed anything.
        own: those that are not others'.
        whole: seconds of all processors.

    >>> others(1.5, 1.0, 2.0), others(1.0, 1.2, 2.0)
    (0.25, 0.0)
    """
    return min(max((busy - own) / whole, 0.0), 1.0) if whole > 0 else 0.0


def busy_s() -> float:
    """Seconds that this machine's processors have computed since it started, without what a hypervisor took from them."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq) * _TICK_S


def _process_s(pid: int) -> float:
    """Seconds that a process has computed; 0 once it has ended."""
    try:
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) * _TICK_S
