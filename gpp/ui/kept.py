"""The keepers of the runs whose pages are open, as the server sees them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final

from gpp.child import same_modules
from gpp.runtime.worker.parent import worker_environment

MOST = 4
"""Runs that are kept: each takes 270 MB (mmt), and comes back within seconds."""

ENDED = b'{"status":"failed","reason":"the process that plans has ended: load the page again"}'


@final
class KeptRun:
    """One run's keeper."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._numbers = process, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {0: asyncio.get_running_loop().create_future()}
        self._turns = dict[str, int]()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def of(cls, run_dir: Path, trusted: Sequence[str]) -> KeptRun:
        """A keeper that has started."""
        environment = {**os.environ, **worker_environment(1), **same_modules()}
        command = [sys.executable, "-m", "gpp.ui.keeper", str(run_dir), *trusted]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment))

    @property
    def ended(self) -> bool:
        """Whether it answers no more."""
        return self._reader.done()

    async def page(self) -> bytes:
        """The JSON of `Bench.page`, or of why the run cannot be planned again."""
        return await asyncio.shield(self._waiting[0])

    async def ask(self, page: str, turn: int, asked: str) -> bytes:
        """The JSON of an answer; empty where the page has asked anew meanwhile.

        Args:
            page: which page asks, of those that are open in browsers.
            turn: the number of the question among those of its page; requests may come in another order than they were sent.
            asked: the JSON of a `gpp.ui.bench.PlanQuestion`.
        """
        if self.ended or self._process.stdin is None:
            return ENDED
        if turn < self._turns.get(page, turn):
            return b""
        self._turns[page] = turn
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"number": number, "page": page, "asked": asked}).encode() + b"\n")
        return await self._waiting[number]

    async def _read(self) -> None:
        out = self._process.stdout
        assert out is not None
        while head := await out.readline():
            number, size = map(int, head.split())
            content = await out.readexactly(size)
            found = self._waiting[number] if number == 0 else self._waiting.pop(number)
            if not found.done():
                found.set_result(content)
        for number, found in self._waiting.items():
            if not found.done() and (number or not found.cancelled()):
                found.set_result(ENDED)

    async def close(self) -> None:
        """End the process and those that it has started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        await self._reader


@final
class KeptRuns:
    """At most `MOST` keepers, those that were asked last."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._trusted, self._kept, self._turn = trusted, dict[Path, KeptRun](), asyncio.Lock()

    async def of(self, run_dir: Path) -> KeptRun:
        """The keeper of a run directory, started if need be."""
        async with self._turn:  # two requests of a page that opens are to find one
            found = self._kept.pop(run_dir, None)
            if found is not None and found.ended:
                await found.close()
                found = None
            self._kept[run_dir] = found or await KeptRun.of(run_dir, self._trusted)
            if len(self._kept) > MOST:
                await self._kept.pop(next(iter(self._kept))).close()
            return self._kept[run_dir]

    async def close(self) -> None:
        """End all of them."""
        for kept in self._kept.values():
            await kept.close()
        self._kept.clear()
