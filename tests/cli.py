"""Running `run.py` as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOWERS = [
    "model=imported",
    "model.input_specs={x: {shape: [8]}}",
    "model.target_specs={y: {}}",
    "model.loss=mse",
    "data=imported",
    "data.factory=tests.zoo.Samples",
]


@dataclass
class Finished:
    code: int
    out: str
    took_s: float
    run_dir: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result.json").read_text())


def start(run_dir: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """`python run.py` with the tests' own cache and no tracker."""
    where = f"hydra.sweep.dir={run_dir}" if "-m" in words or "-cn" in words else f"hydra.run.dir={run_dir}"
    return subprocess.Popen(
        [sys.executable, "run.py", *words, where],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **env},
    )


def run(run_dir: Path, *words: str, **env: str) -> Finished:
    """The same, to its end."""
    began = time.perf_counter()
    process = start(run_dir, *words, **env)
    out, _ = process.communicate(timeout=240)
    return Finished(process.returncode, out, time.perf_counter() - began, run_dir)


def workers_of(run_dir: Path) -> list[int]:
    """Processes that belong to a run."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"gpp.runtime.worker" in words and str(run_dir).encode() in words:
                found.append(int(proc.name))
    return found
