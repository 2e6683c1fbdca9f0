"""Ctrl-C before there is anything to end. A program calls this before it imports anything else, so this imports almost nothing."""

import os
import signal


def leave_at_once() -> None:
    """Let Ctrl-C end this process in one line with exit code 130, until another handler takes over.

    An exception would come out of an import as whatever that makes of it: numpy shows a traceback about a broken installation.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    os.write(2, f"error: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
