"""A program on several ranks, as a launcher would start it, in forks of one process that has imported everything.

`python -m tests.support.ranks WORLD PORT MODULE FUNCTION WORDS...` calls the function with the words on every rank. Nobody ends the
others where one ends: that is theirs to find out.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


def run_ranks(world: int, module: str, function: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Call a function on each of `world` ranks, to the end of all of them; what they print together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.run(
        [sys.executable, "-m", "tests.support.ranks", str(world), str(port), module, function, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def _main(world: int, port: str, module: str, function: str, *words: str) -> int:
    call = getattr(importlib.import_module(module), function)
    for name in ("torch.export", "gpp.app.pipeline", "gpp.runtime.live.ranks"):
        importlib.import_module(name)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            code = 1
            try:
                call(*words)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), *sys.argv[2:]))
