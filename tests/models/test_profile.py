"""A model of which only a profile is known, from the command line's objects to a simulated plan."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpp.errors import InvalidConfig
from gpp.models.profile import Profile
from tests.conf import CONF
from tests.planners.published import PROFILES

ROOT = CONF.parent


def story(tmp_path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "run.py", "model=profile", f"model.path={PROFILES / 'b2x16.piper.json'}", "logger=none", *words]
    return subprocess.run([*command, f"hydra.run.dir={tmp_path}"], cwd=ROOT, capture_output=True, text=True)


def test_plans_and_simulates_from_the_command_line(tmp_path):
    words = ("cluster=flat", "strategy=piper", "strategy.planner.compatible=true", "mode=plan", "minibatch_size=64")
    done = story(tmp_path, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "0.0642287 s a sample" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok" and result["plan"]["num_ops"] == 36
    assert result["model"] == "b2x16" and "one sample is one micro-batch of the profile" in done.stdout


def test_training_is_refused_before_anything_starts(tmp_path):
    done = story(tmp_path, "cluster=local")
    assert done.returncode == 2 and not (tmp_path / "job").exists()
    assert "is a profile" in done.stdout + done.stderr and "mode=plan" in done.stdout + done.stderr


def test_settings_are_checked():
    with pytest.raises(InvalidConfig, match=r"model\.path"):
        Profile(name="x", loss="none", path="nowhere.txt")
    with pytest.raises(InvalidConfig, match=r"model\.seconds"):
        Profile(name="x", loss="none", path=str(PROFILES / "b2x16.json"), seconds=0)
    with pytest.raises(InvalidConfig, match="no network to train"):
        Profile(name="x", loss="none", path=str(PROFILES / "b2x16.json")).build()
