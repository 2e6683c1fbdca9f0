"""A small one of the zoo in the suite; `python -m tests.checks.zoo` has all of them, with processes."""

from __future__ import annotations

from pathlib import Path

import gpp
from gpp.schedules.interleaved_1f1b import Interleaved1F1B
from tests.support.threads import workers_in_threads
from tests.zoo.rows import trained


def test_layers_that_read_all_blocks_before_them_train_as_in_a_plain_loop(tmp_path: Path) -> None:
    """A device has every second stage, so that each reads tensors of both; one that two stages of a device read goes there once."""
    strategy = gpp.Strategy(name="zoo", planner=gpp.Even(), schedule=Interleaved1F1B())
    small = ("model.num_layers=3", "model.num_blocks=3")
    with workers_in_threads():
        row = trained("block_residuals_small", 2, tmp_path / "run", strategy, *small)
    assert row.equal and row.stages == 4
    assert row.apart > row.predicted == row.measured
