"""The worker of one process of a launch, which is its child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpp.files import open_binary
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.worker.parent import MODULE, PARENT, identity

END_S = 5.0
"""Seconds that a worker has to end after a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWorker:
    """The worker of one place, a child of its process."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, place: LaunchPlace, run_dir: Path, env: Mapping[str, str]) -> Self:
        """Start it; what it prints goes to ranks/rank_N.log."""
        own = {
            "RANK": place.rank,
            "LOCAL_RANK": place.local_rank,
            "WORLD_SIZE": place.world,
            "MASTER_ADDR": place.address,
            "MASTER_PORT": place.port,
            # The store is there already, whoever keeps it.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            PARENT: identity(),
        }
        words = [sys.executable, "-m", MODULE, str(run_dir)]
        with open_binary(run_dir / "ranks" / f"rank_{place.rank}.log") as log:
            return cls(
                process=subprocess.Popen(
                    words,
                    env={**os.environ, **env, **{name: str(value) for name, value in own.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def end(self, patience_s: float) -> None:
        """Wait for its end for a while, then end it."""
        for stop in (lambda: None, self.process.terminate, self.process.kill):
            stop()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
                return
            patience_s = END_S
