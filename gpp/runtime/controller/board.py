"""What the processes of a launch say of themselves, in a store, and files that they send each other through it.

A call to a store may block with the network. So a thread exchanges the words, and whoever waits looks at what it has
brought; silence is told by the beats that stay away.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from gpp.errors import WorkerFailed
from gpp.files import folder as make_folder
from gpp.files import open_binary
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.transport.network import client, serve

PERIOD_S = 0.5
LOST_S = 20.0
"""Seconds without a word after which a process counts as gone."""

_STEP_S = 1.0
"""Most seconds of silence that count between two looks: whoever looks may have stood still itself."""

_FAILURES = (dist.DistError, RuntimeError)


def open_store(place: LaunchPlace, *, interface: str, limit_s: float) -> Store:
    """The store in which the processes of a launch meet; rank 0 opens it, unless the launcher keeps one.

    A launcher's own store outlives an attempt: `gpp.runtime.transport.network.of_this_attempt` is the part of one.

    Raises:
        InvalidConfig: the address is not rank 0's on the interface, or the port is in use.
        WorkerFailed: there was no store in time.
    """
    until, limit = time.monotonic() + limit_s, timedelta(seconds=limit_s)
    if place.rank == 0 and not place.agent:
        return PrefixStore("gpp-env", serve(interface, place.address, place.port, limit))
    while True:
        try:
            # By turns, because a signal is noticed between two of them only.
            return PrefixStore("gpp-env", client(place.address, place.port, timedelta(seconds=min(3.0, limit_s))))
        except _FAILURES as error:
            if time.monotonic() > until:
                rule = f"opened no store at {place.address}:{place.port} within {limit_s:g} s (engine.startup_timeout_s)"
                raise WorkerFailed(0, rule) from error


@final
class Board:
    """The words of all processes of a launch, as far as this one has heard them; `close` ends the exchange.

    Args:
        reads: the ranks whose words this one wants.
    """

    def __init__(self, store: Store, *, rank: int, reads: Iterable[int]) -> None:
        self._store, self._rank = store.clone(), rank  # pyright: ignore[reportAttributeAccessIssue]
        self._words: dict[str, Any] = {}
        self._heard: dict[int, dict[str, Any]] = {other: {} for other in reads}
        self._quiet: dict[int, tuple[int, float]] = dict.fromkeys(self._heard, (0, 0.0))
        self._looked_s = time.monotonic()
        self._rounds = 0
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._exchange, name="board", daemon=True)
        self._thread.start()

    def say(self, **words: Any) -> None:
        """Add words to this process's own; they are on their way when it returns."""
        self._words = {**self._words, **words}
        self._wake.set()

    def heard(self, rank: int) -> dict[str, Any]:
        """The latest message of another process; empty until it has come."""
        return self._heard[rank]

    def silent_s(self, rank: int) -> float:
        """Seconds for which a process that has come gave no sign of life, or for which the store could not be reached.

        It counts between calls: whoever wants to know calls often.
        """
        now_s = time.monotonic()
        gap_s, self._looked_s = min(now_s - self._looked_s, _STEP_S), now_s
        for other, words in self._heard.items():
            beat, quiet_s = self._quiet[other]
            fresh = words.get("beat", 0)
            self._quiet[other] = (fresh, 0.0 if fresh != beat or not words else quiet_s + gap_s)
        return self._quiet[rank][1]

    def flush(self, limit_s: float) -> None:
        """Wait until what was said is in the store, at most `limit_s` seconds."""
        rounds, until = self._rounds, time.monotonic() + limit_s
        self._wake.set()
        while self._rounds < rounds + 2 and self._thread.is_alive() and time.monotonic() < until:
            self._wake.set()
            time.sleep(0.01)

    @property
    def open(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the exchange."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=2.0)

    @staticmethod
    def _key(rank: int) -> str:
        return f"said/{rank}"

    def _exchange(self) -> None:
        known: list[int] = []
        beat = 0
        while not self._closed:
            beat += 1
            self._wake.clear()
            try:
                self._store.set(self._key(self._rank), json.dumps({**self._words, "beat": beat}))
                # To get a key that is not there blocks.
                known += [other for other in self._heard if other not in known and self._store.check([self._key(other)])]
                records = self._store.multi_get([self._key(other) for other in known]) if known else []
            except _FAILURES:
                return  # the store is gone
            self._heard.update({other: json.loads(record) for other, record in zip(known, records, strict=True)})
            self._rounds += 1
            self._wake.wait(PERIOD_S)


@final
class Mail:
    """Messages from one process to another through a store, in order, a few at a time: a store keeps them in memory.

    Args:
        name: of this direction between these two.
    """

    BYTES = 4 << 20
    UNDER_WAY = 4

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._next, self._taken = store.clone(), name, 0, 0  # pyright: ignore[reportAttributeAccessIssue]

    def send(self, message: bytes, go_on: Callable[[], object]) -> None:
        """Send the next message; waits while too many are under way, and calls `go_on` then, which may raise."""
        while self._next - self._taken >= self.UNDER_WAY:
            self._taken = self._store.add(f"{self._name}/taken", 0)
            if self._next - self._taken >= self.UNDER_WAY:
                go_on()
                time.sleep(0.005)
        self._store.set(f"{self._name}/{self._next}", message)
        self._next += 1

    def receive(self) -> bytes | None:
        """The next message; None if it has not come yet."""
        key = f"{self._name}/{self._next}"
        if not self._store.check([key]):
            return None
        message = self._store.get(key)
        self._store.delete_key(key)
        self._store.add(f"{self._name}/taken", 1)
        self._next += 1
        return message


def send_file(mail: Mail, folder: Path, name: str, go_on: Callable[[], object] = lambda: None, *, at: int = 0) -> int:
    """Send a file of a folder, or what it has from a place on; returns its length.

    Args:
        at: bytes that have been sent before; the rest is added to them there. 0 replaces the file.
    """
    digest, grows = hashlib.sha256(), at > 0
    with open(folder / name, "rb") as file:
        file.seek(at)
        while True:
            part = file.read(Mail.BYTES)
            digest.update(part)
            last = len(part) < Mail.BYTES
            head = {"file": name, "at": at, "grows": grows, "last": last, "sha256": digest.hexdigest() if last else None}
            mail.send(json.dumps(head).encode() + b"\n" + part, go_on)
            at += len(part)
            if last:
                return at


@final
class Inbox:
    """Writes the files that come by mail into a folder; each is whole, or has grown, when its name shows it.

    Args:
        takes: whether a name is one that may come.
    """

    def __init__(self, mail: Mail, folder: Path, takes: Callable[[str], object]) -> None:
        self._mail, self._folder, self._takes, self._digest = mail, folder, takes, hashlib.sha256()

    def take(self) -> str | None:
        """Write the next message; returns the name of a file that has become whole, "" in the middle of one, None for no message.

        Raises:
            WorkerFailed: the file is not the one that was sent.
        """
        message = self._mail.receive()
        if message is None:
            return None
        line, _, part = message.partition(b"\n")
        head = json.loads(line)
        name = head["file"]
        if not self._takes(name):
            raise WorkerFailed(0, f"a file came that is none of this run's ({name})")
        path = self._folder / name
        make_folder(path.parent)
        target = path if head["grows"] else path.with_name(f"{path.name}.part")
        with open_binary(target, "r+b" if head["at"] else "wb") as file:
            file.seek(head["at"])
            file.write(part)
        self._digest.update(part)
        if not head["last"]:
            return ""
        digest, self._digest = self._digest.hexdigest(), hashlib.sha256()
        if digest != head["sha256"]:
            raise WorkerFailed(0, f"{name} has changed on its way")
        os.replace(target, path)
        return name
