"""Every sweep in sweeps/ means something with every engine, or is refused with a clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks.settings import ENGINES, SWEEPS, first_job, misfit
from tests.support.one_process import answered, check_only

# Every sixteenth one with one engine, and the asynchronous one with the engine that needs nothing too: its emulation's settings
# once fitted no other. `python -m tests.checks.settings --sweeps` tries all.
SAMPLE = [(sweep, ENGINES[i // 4 % len(ENGINES)]) for i, sweep in enumerate(SWEEPS) if i % 16 == 1]


@pytest.mark.parametrize(("sweep", "engine"), dict.fromkeys([*SAMPLE, ("async_throughput", "simulate")]))
def test_a_sweep_runs_with_an_engine_or_is_refused(
    sweep: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = answered([*first_job(sweep, engine), f"hydra.run.dir={tmp_path}"], check_only, monkeypatch)
    assert not misfit(engine, code, out), out
