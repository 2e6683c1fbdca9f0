"""Where a test of the cards runs: on this machine's cores, on one card that workers share, or on a card for each worker.

The tests' bodies are the same everywhere: on cores they are run by everybody, so that a new card finds code that works.
"""

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import ROOT, Finished, run, run_cold

CPU, ONE, ALL = "cpu", "one_card", "cards"
CARDS = [pytest.param(ONE, marks=pytest.mark.gpu), pytest.param(ALL, marks=pytest.mark.gpu)]
EVERYWHERE = [CPU, *CARDS]
SELDOM = [pytest.param(CPU, marks=pytest.mark.long), *CARDS]
"""Those whose dry run on cores says little beside another one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of the three, as far as this machine has it."""

    name: str
    cards: int

    @property
    def on_card(self) -> bool:
        return self.name != CPU

    def words(self, workers: int) -> list[str]:
        """The cluster of so many workers."""
        if not self.on_card:
            return ["cluster=local", f"cluster.num_devices={workers}"]
        return ["cluster=local_gpus", f"cluster.num_devices={workers}"]

    def shared(self, workers: int) -> int:
        """How many of so many workers are on one card."""
        return -(-workers // max(1, self.cards)) if self.on_card else 1

    def run(self, run_dir: Path, workers: int, *words: str, engine: str = "distributed") -> Finished:
        """`run.py` on so many workers, to its end."""
        words = ("logger=none", *self.words(workers), f"engine={engine}", *words)
        if self.shared(workers) > 1 and engine == "distributed":
            words = (*words, f"engine.workers_per_card={self.shared(workers)}")
        env = {"CUDA_VISIBLE_DEVICES": "0"} if self.name == ONE else {}
        # A fork of a process that has asked for cards may not use them.
        return (run_cold if self.on_card else run)(run_dir, *words, **env)


def place_of(name: str) -> Place:
    """The place of a name; skips where this machine lacks it."""
    if name == CPU:
        return Place(name=name, cards=0)
    import torch

    cards = torch.cuda.device_count()
    if not cards:
        pytest.skip(f"no CUDA device (torch {torch.__version__})")
    if name == ALL and cards == 1:
        pytest.skip("one card only; the tests of one_card run on it")
    return Place(name=name, cards=1 if name == ONE else cards)


@cache
def machine() -> dict[str, Any]:
    """What figures depend on."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cards = [torch.cuda.get_device_properties(card) for card in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cards and torch.distributed.is_nccl_available() else None
    return {
        "commit": commit or None,
        "cards": [{"name": card.name, "memory_bytes": card.total_memory} for card in cards],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": nccl,
    }
