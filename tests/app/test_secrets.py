"""Secrets reach the workers, and no file, terminal or tracker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpp.private import SECRETS
from gpp.runtime.checkpoint.resume import find
from gpp.runtime.job import Job
from tests.support.cli import TOWERS, Finished, run
from tests.support.secret_data import DSN, KEY, TOKEN

WORDS = [
    *TOWERS[:-1],
    "data.factory=tests.support.secret_data.Samples",
    "model.factory=tests.support.zoo.Towers",
    "cluster.num_devices=2",
    "cost=analytical",
    "minibatch_size=16",
    "steps=2",
    "evaluate_every=0",
    "baselines_s=0",
]
ARGS = f"github_token: '{TOKEN}', dsn: '{DSN}'"


def leaks(done: Finished, *, within: Path | None = None) -> list[str]:
    """Files below a run directory that hold a secret."""
    hide = [word.encode() for word in (KEY, TOKEN, "PASSW0RD")]
    folder = within or done.run_dir
    out = [
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and any(w in path.read_bytes() for w in hide)
    ]
    return out + ["the terminal"] * any(word.decode() in done.out for word in hide)


@pytest.mark.dist
def test_an_exception_that_quotes_secrets_puts_them_nowhere(tmp_path: Path) -> None:
    done = run(tmp_path / "run", *WORDS, f"data.args={{{ARGS}}}", "logger=wandb", WANDB_API_KEY=KEY, WANDB_MODE="offline")
    assert done.code == 1 and leaks(done) == []
    assert "refused *** with *** at postgres://me:***@db/samples: ***" in done.result["reason"]
    logs = [path.read_text() for path in done.run_dir.glob("ranks/*/*/*/std*.log")]
    assert sum("connecting by ***" in text for text in logs) >= 2
    settings = json.loads((done.run_dir / "job" / "settings.json").read_text())
    assert settings["data"]["args"] == {"github_token": "***secret 0***", "dsn": "***secret 1***"}
    assert "github_token: '***'" in (done.run_dir / "config.yaml").read_text()
    open_to_others = [path for path in done.run_dir.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077]
    assert all("wandb" in path.relative_to(done.run_dir).parts[:-1] for path in open_to_others)  # wandb's own, in a closed folder


@pytest.mark.dist
def test_a_run_with_secret_settings_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = f"data.args={{{ARGS}, quotes: false}}"
    done = run(tmp_path / "run", *WORDS, quiet, "logger=none", "checkpoint.every=1", WANDB_API_KEY=KEY)
    assert done.code == 0, done.out
    assert leaks(done) == [] and find(done.run_dir, 3).manifest.step == 2
    monkeypatch.setenv(SECRETS, json.dumps([TOKEN, DSN]))
    assert Job.load(done.run_dir).settings.data["args"] == {"github_token": TOKEN, "dsn": DSN, "quotes": False}
    monkeypatch.delenv(SECRETS)
    with pytest.raises(Exception, match="GPP_SECRETS"):
        Job.load(done.run_dir)
