"""The jobs of a sweep directory, including those that failed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Required

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from gpp.analysis.comparison import Status
from gpp.errors import InvalidFile
from gpp.serialization import read_json

SETUP = ("model", "strategy", "cluster", "engine")
RESULT = "result.json"
EMULATE = "emulate"
"""The engine, as a result names it, whose `measured` is of emulated devices."""

KEPT = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedJob:
    """A job that a sweep asks for.

    Args:
        folder: its directory, relative to the sweep's.
        overrides: the words of the command line that make it, as in `strategy=even`.
        configuration: hash of its settings, as its result.json has to have it.
    """

    folder: str
    overrides: tuple[str, ...]
    configuration: str


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
    configuration: str | None
    reason: str | None
    model: str | None
    strategy: str | None
    schedule: str | None
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


def source_of(results: Iterable[Mapping[str, Any]]) -> str:
    """What readers are told that `measured` of these results is: `measured`, `emulated`, or both words where both are here."""
    emulated = {result.get("engine") == EMULATE for result in results if result.get("measured")}
    return {frozenset({True}): "emulated", frozenset({True, False}): "measured or emulated"}.get(frozenset(emulated), "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
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


def read_jobs(directory: Path, asked: Sequence[AskedJob], why: str = "") -> list[SweepJob]:
    """The jobs that a sweep asks for, in its order; what else lies in the directory is another sweep's.

    Args:
        why: why the sweep ended before all jobs did; empty if it came to its end.
    """
    return [_read_job(directory, job, why) for job in asked]


def numbers(values: Iterable[Any]) -> list[float]:
    """The finite numbers among values of a result."""
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]


def attempts(job: SweepJob) -> list[SweepJob]:
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


def _read_job(directory: Path, asked: AskedJob, why: str) -> SweepJob:
    path, overrides = directory / asked.folder, parse_overrides(asked.overrides)
    missing = f"no result: {why or 'the job did not come to an end'}"
    try:
        result: dict[str, Any] = {**read_json(ResultFile, path / RESULT)}
        if result.get("configuration") != asked.configuration:
            result = {"status": "failed", "reason": f"{missing}; what is there is another configuration's"}
    except InvalidFile as error:
        damage = InvalidFile(f"{asked.folder}/{RESULT}", error.place, error.rule, "run the job again", error.values)
        result = {"status": "failed", "reason": str(damage) if os.path.lexists(path / RESULT) else missing}
    for key in (*SETUP, "seed"):
        if result.get(key) is None:
            given = overrides.get(key)
            result[key] = int(given) if given and key == "seed" and re.fullmatch("[0-9]{1,10}", given) else given
    for key in ("plan", "predicted", "measured"):
        result.setdefault(key, None)
    return SweepJob(name=asked.folder, overrides=overrides, result=result, has_report=(path / "report.html").exists())
