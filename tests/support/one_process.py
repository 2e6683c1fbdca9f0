"""`run.py` in the tests' own process, for command lines that are refused before anything runs.

Composing a configuration takes most of the time of such a run, so it is done once; importing and forking cost nothing.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra

from gpp.app.cli import main
from tests.support.cli import ROOT


def check_only(experiment: Any, recorder: Any) -> None:
    """A story that ends before anything is captured, measured or planned."""
    experiment.check()


def answered(
    words: list[str], story: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch, folder: Path = ROOT
) -> tuple[int, str]:
    """Exit code and output of `run.py` with some words and a story of its own, typed in a folder."""
    get_mode = Hydra.get_mode

    def mode(self: Hydra, config_name: str, overrides: list[str]) -> object:
        """It composes everything a first time to find the mode, which only a sweep's own file sets."""
        known = config_name == "config" or "hydra.mode=RUN" in overrides
        return None if known else get_mode(self, config_name, overrides)

    GlobalHydra.instance().clear()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(gc, "set_threshold", lambda *numbers: None)
    monkeypatch.setattr(Hydra, "get_mode", mode)
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as end:
        main(story)
    return int(end.value.code or 0), out.getvalue()
