"""Signals that ask a run to end, as an exception: so every end writes its result, and a sweep its table."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

IMPORT_S = 3.0
"""Most seconds that an import holds a signal back."""

LOOK_S = 0.02

DYING_S = 0.3
"""Seconds that a launcher may take to die."""


class Stopped(BaseException):
    """A signal asked this process to end. No `Exception`: what goes on after the failure of a job ends, too."""

    def __init__(self, number: int, why: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{why}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code with which a shell reports a process that the signal has ended."""
        return 128 + self.number


@dataclass(slots=True)
class _StopState:
    """Of this process.

    Args:
        number: the first signal that arrived; later ones change nothing.
        holding: how many blocks hold it back.
        raised: whether the exception was raised for it.
        launcher: the process that started this one, if its end is to end this one.
        arrived_s: when the first signal arrived.
    """

    number: int | None = None
    holding: int = 0
    raised: bool = False
    launcher: int | None = None
    arrived_s: float = 0.0


_state = _StopState()


def listen() -> None:
    """From now on raise `Stopped` for a signal, except for signals that this process was started to ignore."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _arrived)
    # torch's launcher would put handlers of its own in their place.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"


def end_with_launcher() -> None:
    """From now on raise `Stopped` when the process that started this one ends, too, however that ends."""
    from gpp.runtime.worker.parent import signal_with_parent

    _state.launcher = os.getppid()
    signal_with_parent(signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """Raise `Stopped` after the block for a signal that arrives in it, so that what it writes is written whole."""
    _state.holding += 1
    try:
        yield
    finally:
        _state.holding -= 1
        _raise()


def check() -> None:
    """Raise `Stopped` again if it was raised before and this process still goes on: a library has caught it and dropped it."""
    if _state.raised and not _state.holding:
        _state.raised = False
        _raise()


def _arrived(number: int, frame: FrameType | None) -> None:
    if _state.number is None:
        _state.number, _state.arrived_s = number, time.monotonic()
    _raise_outside_imports(frame)


def _raise_outside_imports(frame: FrameType | None) -> None:
    """Raise now; or soon, where a module is being imported: libraries swallow what is raised then, or name it otherwise."""
    if _importing(frame) and time.monotonic() - _state.arrived_s < IMPORT_S:
        signal.signal(signal.SIGALRM, lambda number, frame: _raise_outside_imports(frame))
        signal.setitimer(signal.ITIMER_REAL, LOOK_S)
    else:
        _raise()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _raise() -> None:
    if _state.number is not None and not _state.raised and not _state.holding:
        _state.raised = True
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is still to come would kill a process that is ending
        raise Stopped(_state.number, f": its launcher, process {_state.launcher}, has ended" if _orphaned() else "")


def _orphaned() -> bool:
    """Whether the launcher has ended. The kernel's signal comes with the end of its first thread, a moment before its own."""
    until = time.monotonic() + DYING_S
    while _state.launcher is not None and os.getppid() == _state.launcher:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return _state.launcher is not None
