"""The jobs of a sweep directory, including those that failed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from gpp.errors import InvalidFile
from gpp.report.run.result import Status
from gpp.serialization import read_json, read_yaml

SETUP = ("model", "strategy", "cluster", "engine")
RESULT = "result.json"
KEPT = ConfigDict(extra="allow")
NO_RESULT = "no result.json: the job did not come to an end"


@with_config(KEPT)
class TimesOfResult(TypedDict, total=False):
    """`predicted` or `measured` of a result, as far as sweeps read it; the other keys are kept."""

    iteration_s: float | None
    throughput_samples_per_s: float | None
    bubble_fraction: float | None
    communication_bytes: float | None
    peak_memory_bytes: dict[str, float | None] | None


@with_config(KEPT)
class ResultFile(TypedDict, total=False):
    """A run's result.json, as far as sweeps read it; the other keys are kept."""

    status: Required[Status]
    reason: str | None
    model: str | None
    strategy: str | None
    cluster: str | None
    engine: str | None
    seed: int | None
    plan: dict[str, Any] | None
    predicted: TimesOfResult | None
    measured: TimesOfResult | None
    prediction_error: float | None
    loss: list[float | None]
    final_metric: dict[str, float | None]
    compared: list[ResultFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a sweep.

    Args:
        name: the job's directory, relative to the sweep's.
        overrides: key -> value as given on the command line, in order.
        result: the content of result.json; a job without a readable one has status `failed` and the reason.
    """

    name: str
    overrides: dict[str, str]
    result: dict[str, Any]
    has_report: bool = False

    @property
    def ok(self) -> bool:
        return self.result.get("status") == "ok"


def parse_overrides(items: Iterable[str]) -> dict[str, str]:
    """`["strategy=graphpipe", "+x.y=1", "~z"]` as key -> value; a deletion has an empty value."""
    out = {}
    for item in items:
        key, _, value = str(item).partition("=")
        out[key.lstrip("+~").partition("@")[0]] = value
    return out


def read_jobs(directory: Path, jobs: Sequence[tuple[Path | str, Sequence[str]]] | None = None) -> list[Job]:
    """The jobs of a sweep directory.

    Args:
        jobs: (directory, overrides) in order; None finds the subdirectories that hold a result.json or Hydra's
            overrides, in natural order of their names (2 before 10).
    """
    if jobs is None:
        found = [p for p in directory.glob("*") if p.is_dir() and ((p / "result.json").exists() or (p / ".hydra").is_dir())]
        found += [
            p.parent
            for pattern in ("*/*/result.json", "*/*/*/result.json")
            for p in directory.glob(pattern)
            if not any(parent in found for parent in (p.parent, *p.parent.parents))
        ]
        jobs = [
            (path.relative_to(directory), _stored_overrides(path))
            for path in sorted(set(found), key=lambda p: natural_order(str(p.relative_to(directory))))
        ]
    return [_read_job(directory, directory / path, overrides) for path, overrides in jobs]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted paths; lists become JSON text, so that a cell holds the whole list."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix: json.dumps(value) if isinstance(value, list) else value}


def numbers(values: Iterable[Any]) -> list[float]:
    """The finite numbers among values of a result."""
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]


def attempts(job: Job) -> list[Job]:
    """A job for each strategy that a job compared; the job itself where it compared none."""
    compared = job.result.get("compared")
    if compared is None:
        return [job]
    rest = {key: value for key, value in job.result.items() if key != "compared"}
    return [replace(job, result={**rest, **found}) for found in compared]


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `job9` before `job10`."""
    return [
        (0, int(piece), "") if re.fullmatch("[0-9]{1,18}", piece) else (1, 0, piece)
        for piece in re.split("([0-9]+)", name)
        if piece
    ]


def _stored_overrides(path: Path) -> list[str]:
    try:
        stored = read_yaml(path / ".hydra" / "overrides.yaml")
    except InvalidFile:
        return []
    return [str(item) for item in stored] if isinstance(stored, list) else []


def _read_job(directory: Path, path: Path, items: Sequence[str]) -> Job:
    overrides = parse_overrides(items)
    name, file = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path), path / RESULT
    try:
        result: dict[str, Any] = {**read_json(ResultFile, file)}
    except InvalidFile as error:
        damage = InvalidFile(f"{name}/{RESULT}", error.place, error.rule, "run the job again", error.values)
        result = {"status": "failed", "reason": str(damage) if os.path.lexists(file) else NO_RESULT}
    for key in (*SETUP, "seed"):
        if result.get(key) is None:
            given = overrides.get(key)
            result[key] = int(given) if given and key == "seed" and re.fullmatch("[0-9]{1,10}", given) else given
    for key in ("plan", "predicted", "measured"):
        result.setdefault(key, None)
    return Job(name=name, overrides=overrides, result=result, has_report=(path / "report.html").exists())
