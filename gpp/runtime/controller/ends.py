"""The ends of processes."""

from __future__ import annotations

import os
import signal


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its exit code is left for whoever started it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # it was asked before


def by_signal(number: int) -> str:
    """That a signal has ended a worker, and who may have sent it."""
    senders = {
        signal.SIGKILL: "; the kernel does that to a process when memory runs out",
        signal.SIGTERM: ", which this run did not send: a user, a scheduler or a shutdown of the machine did",
    }
    return f"killed by {signal.Signals(number).name}{senders.get(signal.Signals(number), '')}"
