"""A program on several ranks, as a launcher would start it, in forks of one process that has imported everything.

Nobody ends the others where one ends: that is theirs to find out.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.support.cli import environment
from tests.support.forked import forked
from tests.support.warm import warm


def run_ranks(world: int, module: str, function: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Call a function on each of `world` ranks, to the end of all of them; what they print together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        code = warm().run([str(world), str(port), module, function, *words], environment(), out, script=__file__)
        return subprocess.CompletedProcess((module, function), code, out.read_text())


def _main(world: int, port: str, module: str, function: str, *words: str) -> int:
    call = getattr(importlib.import_module(module), function)

    def rank_of(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        call(*words)

    pids = [forked(partial(rank_of, rank)) for rank in range(world)]
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), *sys.argv[2:]))
