"""The place where the controller leaves the job of the next plan, and workers look for it. This module is free of torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpp.files import complete
from gpp.runtime.job import Job


def announced(run_dir: Path, number: int) -> Path:
    """The folder whose `job/` is that of a plan, by its number: 0 for the first in a run that replaces another."""
    return run_dir / "ranks" / f"next_{number}"


def announce(run_dir: Path, number: int, job: Job) -> None:
    """Let the workers take a plan over: its job is written, and proved to fit together as they will prove it, before they see it.

    Raises:
        InvalidFile, MalformedProgram: it does not.
    """
    folder = announced(run_dir, number)
    half = folder.with_name(f".{folder.name}")
    try:
        job.save(half)
        Job.load(half)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    complete(half, folder)
