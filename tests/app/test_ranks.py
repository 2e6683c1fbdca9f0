"""`gpp.parallelize` on several ranks of a launch, each of which runs the program."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import gpp
from gpp.errors import InvalidConfig
from tests.app.test_pipeline import SHAPES, batches, decayed, model_of, plain_losses, started
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.dist


def train(folder: str) -> None:
    """What each rank does: its own weights count on rank 0 alone."""
    rank, model, data = int(os.environ["RANK"]), model_of(), batches(len(SHAPES), SHAPES)
    if rank:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    with started(model, Path(folder, "run"), optimizer=gpp.ByFactory(factory=decayed, clip_norm=0.5)) as pipeline:
        losses = [pipeline.step(inputs, targets) for inputs, targets in data]
        inputs, targets = data[0]
        with pytest.raises(InvalidConfig, match="differs from that of rank 0 on rank 1"):
            pipeline.step(inputs, targets.flip(0) if rank else targets)
        held_out = pipeline.evaluate(inputs, targets)
        state = pipeline.state_dict()
    same = all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    found = {"losses": losses, "held_out": held_out, "same": same, "names": sorted(state)}
    found["sum"] = sum(float(weight.sum()) for weight in state.values())
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))


def test_every_rank_has_the_losses_and_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    done = run_ranks(2, __name__, "train", str(tmp_path))
    assert done.returncode == 0, done.stdout
    plain = model_of()
    expected = plain_losses(plain, torch.nn.CrossEntropyLoss(), batches(len(SHAPES), SHAPES))
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert found["losses"] == pytest.approx(expected, rel=1e-12)
        assert found["same"] and found["names"] == sorted(plain.state_dict())
        assert found["sum"] == pytest.approx(sum(float(weight.sum()) for weight in plain.state_dict().values()), rel=1e-12)
        inputs, targets = batches(1)[0]
        assert found["held_out"]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(plain(*inputs), targets).item())
    assert "Measured" in (tmp_path / "run" / "report.html").read_text()


def leave(folder: str, how: str) -> None:
    """Rank 1 goes before its third step, or stays away from it."""
    rank = int(os.environ["RANK"])
    engine = gpp.Distributed(timeout_s=3.0)
    with started(model_of(), Path(folder, "run"), run=gpp.Run(engine=engine)) as pipeline:
        for step, (inputs, targets) in enumerate(batches(4)):
            if rank and step == 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "raises":
                    raise ValueError("the loader is empty")
                time.sleep(60)
            pipeline.step(inputs, targets)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "worker 1 failed: is gone"),
        ("raises", "worker 1 failed: ValueError: the loader is empty"),
        ("stays", "worker 1 failed: does not go on, in the program between two steps"),
    ],
)
def test_a_rank_that_goes_or_stays_away_is_named_by_the_others(tmp_path: Path, how: str, said: str) -> None:
    start = time.monotonic()
    done = run_ranks(3, __name__, "leave", str(tmp_path), how)
    assert done.returncode == 3
    assert said in done.stdout, done.stdout
    assert time.monotonic() - start < 60
