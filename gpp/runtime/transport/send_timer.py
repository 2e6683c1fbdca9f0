"""The seconds of a link for messages that leave while the sender goes on.

The backend says that a message has left only to whoever waits for it, so a thread waits. A link carries the messages of a channel
one after the other: it begins with one when that is there and the one before has left.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import final

import torch.distributed as dist


@final
class TimedSend:
    """A message under way, which a thread waits for."""

    def __init__(self, work: dist.Work, num_bytes: int) -> None:
        self.work, self.num_bytes, self.begun_s = work, num_bytes, time.perf_counter()
        self.left = threading.Event()
        self.error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.left.is_set()

    def wait(self) -> None:
        """Wait until the message has left; raises what the backend has raised."""
        self.left.wait()
        if self.error is not None:
            raise self.error


@final
class SendTimer:
    """The messages of one channel."""

    def __init__(self) -> None:
        self._seen: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[TimedSend] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note(self, num_bytes: int, seconds: float) -> None:
        """A message has left."""
        self._seen.put((num_bytes, seconds))

    def take(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the messages that have left since the last call."""
        return [self._seen.get() for _ in range(self._seen.qsize())]

    def follow(self, work: dist.Work, num_bytes: int) -> TimedSend:
        """Time a message that has just been begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        sent = TimedSend(work, num_bytes)
        self._under_way.put(sent)
        return sent

    def _wait(self) -> None:
        before_s = 0.0
        while True:
            sent = self._under_way.get()
            try:
                sent.work.wait()
                now_s = time.perf_counter()
                self.note(sent.num_bytes, now_s - max(sent.begun_s, before_s))
                before_s = now_s
            except BaseException as error:  # the worker's own thread raises it where it waits
                sent.error = error
            sent.left.set()
