"""Every sweep in sweeps/ means something with every engine, or is refused with a clear sentence."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.one_process import answered, check_only
from tests.support.wrong_settings import ENGINES, SWEEPS, first_job, misfit

# The asynchronous one with the engine that needs nothing: its emulation's settings once fitted no other.
SHORT = {
    ("async_throughput", "simulate"),
    *((sweep, ENGINES[i // 4 % len(ENGINES)]) for i, sweep in enumerate(SWEEPS) if i % 16 == 1),
}


@pytest.mark.parametrize(
    ("sweep", "engine"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in itertools.product(SWEEPS, ENGINES)],
)
def test_a_sweep_runs_with_an_engine_or_is_refused(
    sweep: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = answered([*first_job(sweep, engine), f"hydra.run.dir={tmp_path}"], check_only, monkeypatch)
    assert not misfit(engine, code, out), out
