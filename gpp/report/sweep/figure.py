"""A sweep's figure as data: the columns of results.csv that are its axes, and the numbers that a paper published.

A sweep declares it in its YAML under `hydra.callbacks.sweep.figures`; see `sweeps/figure6.yaml`. The same
declaration gives the picture (`figure_chart`), the table (`figure_table`) and the part of summary.json.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

from gpp.errors import InvalidConfig
from gpp.report.draw.text import quotient
from gpp.report.sweep.jobs import SweepJob, attempts, natural_order, numbers
from gpp.serialization import flatten
from gpp.settings import Text, settings

FIELD = "hydra.callbacks.sweep.figures"
ALL = ""
"""The panel of a figure that has only one."""

Range = tuple[float, float]
Scale = Literal["linear", "log"]


class Key(NamedTuple):
    """Position of a value: panel, series and place on the x axis, as the figure shows them."""

    panel: str
    series: str
    x: str


class FigurePoint(NamedTuple):
    """Median or mean over the ok jobs at one place (seeds, repeats); if there is none, the status of the jobs.

    `deviation` is the sample standard deviation (n - 1) of a mean over several jobs.
    """

    value: float | None
    num_jobs: int
    status: str
    deviation: float | None = None


@settings(FIELD)
class SweepFigure:
    """One figure of a sweep.

    Columns are those of results.csv, as `predicted.iteration_s`; `override.KEY` is the command line's value of a key.

    Args:
        title: heading of the figure.
        y: column of the values.
        x: column along the axis.
        series: column whose values are the lines or the bars of a group.
        panel: column whose values get a picture each, or several columns; None for one picture.
        chart: `lines`, `bars`, or `sorted` (every series' values by size: a distribution over x).
        x_name, y_name: titles of the axes.
        x_scale, y_scale: `linear` or `log`.
        labels: value of a column -> its name in the figure; numbers make a numeric axis.
        order: series in the order of the legend; series that are not listed follow.
        better: whether `higher` or `lower` values are better.
        average: `median` of the jobs on one place, or `mean`, which is shown with the standard deviation.
        normalise: y is shown relative to the best of these series at the same place; above 1 is better.
        multiple_of: y is shown as a multiple of the best of these series at the same place, whichever way is better.
        gain: series whose advantage over the best of `over` is listed; above 1 is better.
        totals: rows below each panel of the table: the `mean` of every series over the places, its `most`, its `least`.
        terminal: whether the table is printed, too.
        published: panel -> series -> x -> number, or [low, high]; without panels series -> x -> number.
        reference: name of the numbers in `published`, where they are not published ones.
        source: their publication.
        notes: sentences below the figure.
    """

    title: str
    y: str
    x: str
    series: str = "strategy"
    panel: str | Sequence[str] | None = None
    chart: Literal["lines", "bars", "sorted"] = "lines"
    x_name: Text = ""
    y_name: Text = ""
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    labels: Mapping[Any, Any] | None = None
    order: Sequence[str] = ()
    better: Literal["higher", "lower"] = "higher"
    average: Literal["median", "mean"] = "median"
    normalise: Sequence[str] = ()
    multiple_of: Sequence[str] = ()
    gain: str | None = None
    over: Sequence[str] = ()
    totals: Sequence[Literal["mean", "most", "least"]] = ()
    terminal: bool = False
    published: Mapping[Any, Any] | None = None
    reference: str = "published"
    source: Text = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.normalise and self.multiple_of:
            raise InvalidConfig(
                f"{FIELD}.multiple_of", list(self.multiple_of), "stands in place of `normalise`", "give one of them"
            )
        if self.average == "mean" and (self.normalise or self.multiple_of):
            rule = "has a deviation, which relative values do not have"
            raise InvalidConfig(f"{FIELD}.average", self.average, rule, "leave out normalise and multiple_of, or average")
        if (self.gain is None) != (not self.over):
            raise InvalidConfig(
                f"{FIELD}.over", list(self.over), "must name the series that `gain` is measured against", "give both"
            )
        self._published_points()  # the form is checked before the first job, not after the last

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> Self:
        """A figure from its YAML.

        Raises:
            InvalidConfig: no figure has a key, or a key that every figure needs is missing.
        """
        known = [f.name for f in fields(cls)]
        wrong = [key for key in declared if key not in known]
        if wrong:
            raise InvalidConfig(f"{FIELD}.{wrong[0]}", declared[wrong[0]], f"must be one of {', '.join(known)}", "correct the name")
        lacking = [name for name in ("title", "y", "x") if name not in declared]
        if lacking:
            raise InvalidConfig(f"{FIELD}.{lacking[0]}", None, "every figure needs it", f"give {lacking[0]}")
        return cls(**declared)

    def evaluate(self, jobs: Sequence[SweepJob]) -> FigureData:
        """The figure's numbers, from the results of the jobs."""
        found: dict[Key, list[SweepJob]] = {}
        for job in itertools.chain.from_iterable(map(attempts, jobs)):
            key = self._key(job)
            if key is not None:
                found.setdefault(key, []).append(job)
        points = {key: self._point(members) for key, members in found.items()}
        return FigureData(figure=self, points=self._normalised(points), published=self._published_points())

    def _key(self, job: SweepJob) -> Key | None:
        row = columns_of(job)
        panel = [self._shown(row.get(name)) for name in self.panel_columns]
        series, x = (self._shown(row.get(name)) for name in (self.series, self.x))
        return None if series is None or x is None or None in panel else Key(", ".join(map(str, panel)), series, x)

    @property
    def panel_columns(self) -> tuple[str, ...]:
        """The columns that tell panels apart."""
        return (self.panel,) if isinstance(self.panel, str) else tuple(self.panel or ())

    def _shown(self, value: Any) -> str | None:
        if value is None:
            return None
        labels = {str(key): str(shown) for key, shown in (self.labels or {}).items()}
        return labels.get(str(value), str(value))

    def _point(self, jobs: Sequence[SweepJob]) -> FigurePoint:
        values = numbers(columns_of(job).get(self.y) for job in jobs if job.ok)
        ends = [str(job.result.get("status")) for job in jobs]
        status = "ok" if values else "infeasible" if "infeasible" in ends else "failed"
        if self.average == "mean" and values:
            return FigurePoint(statistics.mean(values), len(values), status, statistics.stdev(values) if len(values) > 1 else None)
        return FigurePoint(statistics.median(values) if values else None, len(values), status)

    def _normalised(self, points: dict[Key, FigurePoint]) -> dict[Key, FigurePoint]:
        higher = self.better == "higher"
        if self.normalise:
            return {key: point._replace(value=advantage(points, key, self.normalise, higher)) for key, point in points.items()}
        if self.multiple_of:
            shares = {key: advantage(points, key, self.multiple_of, higher) for key in points}
            return {
                key: point._replace(value=shares[key] if higher else quotient(1.0, shares[key])) for key, point in points.items()
            }
        return points

    def _published_points(self) -> dict[Key, Range]:
        out: dict[Key, Range] = {}
        panels = self.published or {}
        try:
            for panel, series in (panels if self.panel else {ALL: panels}).items():
                for name, values in series.items():
                    out.update({Key(str(panel), str(name), str(x)): _range(value) for x, value in values.items()})
        except (AttributeError, TypeError, ValueError):
            form = "panel: {series: {x: number}}" if self.panel else "series: {x: number}"
            raise InvalidConfig(f"{FIELD}.published", self.published, f"must have the form {form}", "correct its levels") from None
        return out


class SeriesGain(NamedTuple):
    """The factor by which one series is better than the best of others; None where either side has no value."""

    panel: str
    x: str
    ours: float | None
    published: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureData:
    """A figure with its numbers."""

    figure: SweepFigure
    points: Mapping[Key, FigurePoint]
    published: Mapping[Key, Range]

    @property
    def panels(self) -> list[str]:
        """Panels in the order of the jobs; panels that only a paper has come last."""
        return list(dict.fromkeys([key.panel for key in self.points] + [key.panel for key in self.published]))

    @property
    def series(self) -> list[str]:
        """Series in the declared order, then in that of the jobs."""
        names = list(dict.fromkeys(key.series for key in (*self.points, *self.published)))
        return [name for name in self.figure.order if name in names] + [name for name in names if name not in self.figure.order]

    def places(self, panel: str) -> list[str]:
        """Places on the x axis of a panel: numbers ascending, words in the order of the jobs."""
        found = dict.fromkeys(key.x for key in (*self.points, *self.published) if key.panel == panel)
        try:
            return sorted(found, key=float)
        except ValueError:
            return list(found)

    def value(self, panel: str, series: str, x: str) -> float | None:
        """Our number at a place."""
        point = self.points.get(Key(panel, series, x))
        return point.value if point else None

    def total(self, panel: str, series: str, kind: str) -> float | None:
        """A series' mean, most or least over the places of a panel; None without values."""
        values = [value for x in self.places(panel) if (value := self.value(panel, series, x)) is not None]
        take = {"mean": statistics.mean, "most": max, "least": min}[kind]
        return take(values) if values else None

    @property
    def gains(self) -> list[SeriesGain]:
        """The declared comparison at every place."""
        figure = self.figure
        if figure.gain is None:
            return []
        higher = figure.better == "higher" or bool(figure.normalise)  # a multiple keeps the direction of its column
        printed = {key: FigurePoint(middle(value), 1, "ok") for key, value in self.published.items()}
        places = [Key(panel, figure.gain, x) for panel in self.panels for x in self.places(panel)]
        return [
            SeriesGain(at.panel, at.x, *(advantage(points, at, figure.over, higher) for points in (self.points, printed)))
            for at in places
        ]

    def summary(self) -> dict[str, Any]:
        """The figure's part of summary.json."""
        figure = self.figure
        keys = sorted({*self.points, *self.published}, key=lambda k: (self.panels.index(k.panel), natural_order(k.x), k.series))
        out: dict[str, Any] = {
            "title": figure.title,
            "y": figure.y,
            "relative_to": list(figure.normalise or figure.multiple_of) or None,
            "points": [self._summary_of(key) for key in keys],
        }
        if figure.totals:
            out["totals"] = {
                panel: {name: {kind: self.total(panel, name, kind) for kind in figure.totals} for name in self.series}
                for panel in self.panels
            }
        if figure.gain is not None:
            ours = [gain.ours for gain in self.gains if gain.ours is not None]
            out["gain"] = {
                "of": figure.gain,
                "over_the_best_of": list(figure.over),
                "min": min(ours, default=None),
                "median": statistics.median(ours) if ours else None,
                "max": max(ours, default=None),
                "points": [gain._asdict() for gain in self.gains],
            }
        return out

    def _summary_of(self, key: Key) -> dict[str, Any]:
        point, printed = self.points.get(key), self.published.get(key)
        value = point.value if point else None
        return {
            **key._asdict(),
            "ours": value,
            **({"deviation": point.deviation if point else None} if self.figure.average == "mean" else {}),
            "published": None if printed is None else printed[0] if printed[0] == printed[1] else list(printed),
            "ratio": quotient(value, middle(printed)) if printed else None,
            "jobs": point.num_jobs if point else 0,
            "status": point.status if point else "not run",
        }


def columns_of(job: SweepJob) -> dict[str, Any]:
    """A job's columns of results.csv; an override of a result's own name is `override.NAME`.

    `NAME.max` is the largest of the values by device or stage, as in `predicted.peak_memory_bytes.max`.
    """
    row = flatten(job.result)
    for half in ("predicted", "measured"):
        for name, values in (job.result.get(half) or {}).items():
            known = numbers(values.values()) if isinstance(values, dict) else []
            row |= {f"{half}.{name}.max": max(known)} if known else {}
    given = {f"override.{key}": value for key, value in job.overrides.items()}
    return {**job.overrides, **row, **given}


def advantage(points: Mapping[Key, FigurePoint], at: Key, others: Iterable[str], higher: bool) -> float | None:
    """How many times better the value at a place is than the best of other series there."""
    own = points.get(at)
    values = [p.value for name in others if (p := points.get(at._replace(series=name))) and p.value is not None]
    best = (max if higher else min)(values, default=None)
    value = own.value if own else None
    return quotient(value, best) if higher else quotient(best, value)


def middle(value: Range) -> float:
    """The geometric middle of a published range."""
    return math.sqrt(value[0] * value[1])


def _range(value: Any) -> Range:
    low, high = value if isinstance(value, list | tuple) else (value, value)
    return float(low), float(high)
