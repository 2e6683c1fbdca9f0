"""Running `run.py` as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.warm import warm

ROOT = Path(__file__).resolve().parents[2]
TOWERS = [
    "model=imported",
    "model.input_specs={x: {shape: [8]}}",
    "model.target_specs={y: {}}",
    "model.loss=mse",
    "data=imported",
    "data.factory=tests.support.zoo.Samples",
]


@dataclass
class Finished:
    code: int
    out: str
    run_dir: Path

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result.json").read_text())


def start(run_dir: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """`python run.py` with the tests' own cache and no tracker."""
    return subprocess.Popen(
        [sys.executable, "run.py", *_words(run_dir, words)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(**env),
    )


def run_cold(run_dir: Path, *words: str, **env: str) -> Finished:
    """The same, to its end."""
    process = start(run_dir, *words, **env)
    out, _ = process.communicate(timeout=240)
    return Finished(process.returncode, out, run_dir)


def run(run_dir: Path, *words: str, **env: str) -> Finished:
    """The same in a fork of a process that has imported everything; its workers are forks too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        code = warm().run(_words(run_dir, words), environment(**env), out)
        return Finished(code, out.read_text(), run_dir)


def _words(run_dir: Path, words: tuple[str, ...]) -> list[str]:
    return [*words, f"hydra.sweep.dir={run_dir}" if "-m" in words or "-cn" in words else f"hydra.run.dir={run_dir}"]


def environment(**env: str) -> dict[str, str]:
    """The environment of a run of the tests, with some variables of its own."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **env}


def workers_of(run_dir: Path, module: str = "gpp.runtime.worker") -> dict[int, int]:
    """Processes that belong to a run, and their parents."""
    found = {}
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0")
                parent = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if module.encode() in words and os.fsencode(run_dir) in words:
                found[int(proc.name)] = parent
    return found
