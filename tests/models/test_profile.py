"""A model of which only a profile is known, from the command line's objects to a simulated plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpp.errors import InvalidConfig
from gpp.models.profile import Profile
from tests.support.cli import Finished, run
from tests.support.published import PROFILES


def story(tmp_path: Path, *words: str) -> Finished:
    return run(tmp_path, "model=profile", f"model.path={PROFILES / 'b2x16.piper.json'}", "logger=none", *words)


def test_plans_and_simulates_from_the_command_line(tmp_path):
    words = ("cluster=flat", "strategy=piper", "strategy.planner.compatible=true", "mode=plan", "minibatch_size=64", "explain_s=0")
    done = story(tmp_path, *words)
    assert done.code == 0, done.out
    assert "0.0642287 s a sample" in done.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok" and result["plan"]["num_ops"] == 36
    assert result["model"] == "b2x16" and "one sample is one micro-batch of the profile" in done.out


def test_training_is_refused_before_anything_starts(tmp_path):
    done = story(tmp_path, "cluster=local")
    assert done.code == 2 and not (tmp_path / "job").exists()
    assert "is a profile" in done.out and "mode=plan" in done.out


def test_settings_are_checked():
    with pytest.raises(InvalidConfig, match=r"model\.path"):
        Profile(name="x", loss="none", path="nowhere.txt")
    with pytest.raises(InvalidConfig, match=r"model\.seconds"):
        Profile(name="x", loss="none", path=str(PROFILES / "b2x16.json"), seconds=0)
    with pytest.raises(InvalidConfig, match="no network to train"):
        Profile(name="x", loss="none", path=str(PROFILES / "b2x16.json")).build()
