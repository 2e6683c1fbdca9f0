"""A folder with two runs of one problem, planned by `run.py` once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpp.ui.bench import Bench
from tests.support.cli import run

TOWERS = ("model=candle_uno_small", "graph.max_ops=12")
PROBLEM = (*TOWERS, "cluster=summit_1x4", "minibatch_size=16", "mode=plan", "explain_s=0")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    # Stages of several operators, which may be moved.
    for strategy, *more in (("graphpipe", "strategy.planner.colocate=never"), ("sequential",)):
        done = run(found / "towers" / strategy, *PROBLEM, f"strategy={strategy}", *more)
        assert done.code == 0, done.out
    (found / "latest").symlink_to(found / "towers" / "graphpipe")
    (found / "towers" / "notes").mkdir()
    return found


@pytest.fixture(scope="session")
def bench(folder: Path) -> Bench:
    return Bench.of(folder / "towers" / "graphpipe")
