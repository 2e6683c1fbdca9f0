"""A sweep's figure: from jobs to numbers, picture, table and summary."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from gpp.errors import InvalidConfig
from gpp.report.sweep.figure import FigureData, Key, SweepFigure
from gpp.report.sweep.figure_chart import figure_svg, figure_table
from gpp.report.sweep.files import write_sweep
from gpp.report.sweep.jobs import AskedJob, SweepJob
from gpp.report.sweep.terminal import show_figures
from tests.support.page_check import parse

DECLARED: dict[str, Any] = {
    "title": "Throughput & <more>",
    "x": "cluster",
    "y": "predicted.throughput_samples_per_s",
    "panel": "model",
    "labels": {"summit_1x4": 4, "summit_2x4": 8},
    "order": ["graphpipe"],
    "gain": "graphpipe",
    "over": ["pipedream", "piper"],
    "published": {"mmt": {"graphpipe": {4: 120, 8: 200}, "pipedream": {4: 100, 8: [80, 125]}}},
    "source": "a paper",
    "notes": ["why"],
}


def job(
    model: str, strategy: str, cluster: str, throughput: float | None, seed: int = 0, overrides: Mapping[str, str] | None = None
) -> SweepJob:
    result = {
        "status": "ok" if throughput else "infeasible",
        "model": model,
        "strategy": strategy,
        "cluster": cluster,
        "engine": "simulate",
        "seed": seed,
        "reason": None if throughput else "too big",
        "plan": {"search_s": 0.1} if throughput else None,
        "predicted": {"throughput_samples_per_s": throughput, "iteration_s": 1 / throughput} if throughput else None,
        "measured": None,
    }
    return SweepJob(name=f"{model}-{strategy}-{cluster}-{seed}", overrides=dict(overrides or {}), result=result)


@pytest.fixture
def jobs() -> list[SweepJob]:
    out = []
    for model in ("mmt", "dlrm"):
        for cluster, devices in (("summit_1x4", 4), ("summit_2x4", 8)):
            out.append(job(model, "pipedream", cluster, 25.0 * devices))
            out.append(job(model, "piper", cluster, 30.0 * devices if model == "mmt" else None))
            out += [job(model, "graphpipe", cluster, value * devices, seed) for seed, value in enumerate((30.0, 45.0, 60.0))]
    return out


def test_points_are_medians_and_gains_are_against_the_best(jobs: list[SweepJob]) -> None:
    data = SweepFigure.of(DECLARED).evaluate(jobs)
    assert data.panels == ["mmt", "dlrm"] and data.series == ["graphpipe", "pipedream", "piper"]
    assert data.places("mmt") == ["4", "8"]
    assert data.value("mmt", "graphpipe", "8") == 45.0 * 8
    assert data.value("dlrm", "piper", "4") is None
    gains = {(gain.panel, gain.x): gain for gain in data.gains}
    assert gains["mmt", "4"].ours == pytest.approx(1.5) and gains["mmt", "4"].published == pytest.approx(1.2)
    assert gains["mmt", "8"].published == pytest.approx(2.0)  # the geometric middle of 80 to 125 is 100
    assert gains["dlrm", "4"].ours == pytest.approx(1.8) and gains["dlrm", "4"].published is None
    summary = data.summary()
    assert summary["gain"]["min"] == pytest.approx(1.5) and summary["gain"]["max"] == pytest.approx(1.8)
    point = next(p for p in summary["points"] if (p["panel"], p["series"], p["x"]) == ("mmt", "pipedream", "8"))
    assert point["published"] == [80.0, 125.0] and point["ratio"] == pytest.approx(2.0) and point["jobs"] == 1
    assert next(p for p in summary["points"] if (p["panel"], p["series"]) == ("dlrm", "piper"))["status"] == "infeasible"


def table_words(data: FigureData) -> str:
    cells = [cell for row in figure_table(data).rows for cell in row]
    return " ".join(cell if isinstance(cell, str) else f"{cell.text} {cell.small}" for cell in cells)


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_normalised_values_above_one_are_better(jobs: list[SweepJob], better: str) -> None:
    y = "predicted.throughput_samples_per_s" if better == "higher" else "predicted.iteration_s"
    figure = SweepFigure.of({**DECLARED, "y": y, "better": better, "normalise": ["pipedream", "piper"]})
    data = figure.evaluate(jobs)
    assert data.value("mmt", "graphpipe", "4") == pytest.approx(1.5)
    assert data.value("mmt", "pipedream", "4") == pytest.approx(25 / 30)
    assert [gain.ours for gain in data.gains] == pytest.approx([1.5, 1.5, 1.8, 1.8])


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_multiples_are_as_large_as_the_values(jobs: list[SweepJob], better: str) -> None:
    y = "predicted.throughput_samples_per_s" if better == "higher" else "predicted.iteration_s"
    words = {"y": y, "better": better, "multiple_of": ["pipedream", "piper"], "reference": "ideal"}
    figure = SweepFigure.of({**DECLARED, **words})
    data, advantages = (
        figure.evaluate(jobs),
        SweepFigure.of({**DECLARED, "y": y, "better": better, "normalise": ["pipedream", "piper"]}),
    )
    share = advantages.evaluate(jobs).value("mmt", "graphpipe", "4")
    assert share is not None and share > 1
    assert data.value("mmt", "graphpipe", "4") == pytest.approx(share if better == "higher" else 1 / share)
    assert [gain.ours for gain in data.gains] == pytest.approx([gain.ours for gain in advantages.evaluate(jobs).gains])
    assert "ideal: a paper" in figure_svg(data) and "published: a paper" not in figure_svg(data)
    with pytest.raises(InvalidConfig, match="in place of `normalise`"):
        SweepFigure.of({**DECLARED, **words, "normalise": ["piper"]})


@pytest.mark.parametrize("chart", ["lines", "bars", "sorted"])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_picture_and_table(jobs: list[SweepJob], chart: str, scale: str) -> None:
    data = SweepFigure.of({**DECLARED, "chart": chart, "x_scale": scale, "y_scale": scale}).evaluate(jobs)
    svg = figure_svg(data)
    ElementTree.fromstring(svg)
    assert "published: a paper" in svg and "nan" not in svg
    words = table_words(data)
    assert ("infeasible" in words) == (chart != "sorted")
    if chart != "sorted":
        assert "published 120, ours 1.50×" in words and "published 1.20×" in words


@pytest.mark.parametrize("chart", ["lines", "bars"])
def test_means_stand_with_their_deviation(jobs: list[SweepJob], chart: str) -> None:
    figure = SweepFigure.of({**DECLARED, "average": "mean", "chart": chart})
    data = figure.evaluate([*jobs, job("mmt", "graphpipe", "summit_1x4", 280.0, seed=3)])
    point = data.points[Key("mmt", "graphpipe", "4")]
    assert point.value == pytest.approx((120 + 180 + 240 + 280) / 4) and point.num_jobs == 4
    assert point.deviation == pytest.approx(((85**2 + 25**2 + 35**2 + 75**2) / 3) ** 0.5)
    assert data.points[Key("mmt", "pipedream", "4")].deviation is None  # of one job
    words = table_words(data)
    assert "205 ± 70.0" in words and "100 ±" not in words
    svg = figure_svg(data)
    ElementTree.fromstring(svg)
    assert "graphpipe at 4: 205 ± 70.0" in svg and "nan" not in svg
    found = {(p["panel"], p["series"], p["x"]): p for p in data.summary()["points"]}
    assert found["mmt", "graphpipe", "4"]["deviation"] == point.deviation and found["mmt", "pipedream", "4"]["deviation"] is None
    assert "deviation" not in SweepFigure.of(DECLARED).evaluate(jobs).summary()["points"][0]


@pytest.mark.parametrize("width", [80, 160])
def test_totals_stand_below_each_panel_and_on_the_terminal(jobs: list[SweepJob], width: int) -> None:
    plain = {key: value for key, value in DECLARED.items() if key not in ("gain", "over", "published")}
    data = SweepFigure.of({**plain, "totals": ["mean", "most"], "terminal": True}).evaluate(jobs)
    assert data.total("mmt", "graphpipe", "mean") == 45.0 * 6 and data.total("dlrm", "piper", "most") is None
    assert data.summary()["totals"]["mmt"]["pipedream"] == {"mean": 150.0, "most": 200.0}
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in figure_table(data).rows]
    assert [row[1] for row in rows] == ["4", "8", "mean", "most"] * 2 and rows[3][:4] == ["mmt", "most", "360", "200"]
    console = Console(width=width, record=True, file=io.StringIO())
    show_figures(console, [data, replace(data, figure=replace(data.figure, terminal=False))])
    lines = console.export_text().splitlines()
    assert sum(line.split()[:2] == ["mmt", "mean"] for line in lines) == 1
    assert max(map(len, lines)) <= width and lines[-1].strip() == "why"


def test_an_accuracy_is_shown_as_a_share_of_a_hundred() -> None:
    jobs = [job("mmt", "graphpipe", "c", 1.0, seed=n) for n in range(2)]
    for each, accuracy in zip(jobs, (0.95, 0.97), strict=True):
        each.result["final_metric"] = {"accuracy": accuracy}
    data = SweepFigure.of({"title": "t", "x": "model", "y": "final_metric.accuracy", "chart": "bars", "average": "mean"}).evaluate(
        jobs
    )
    assert "graphpipe at mmt: 96.0 % ± 1.4 %" in figure_svg(data)


def test_a_sweep_writes_its_figures(tmp_path: Path, jobs: list[SweepJob]) -> None:
    for each in jobs:
        (tmp_path / each.name).mkdir()
        (tmp_path / each.name / "result.json").write_text(json.dumps({**each.result, "configuration": each.name}))
    asked = [AskedJob(folder=each.name, overrides=(), configuration=each.name) for each in jobs]
    write_sweep(tmp_path, asked, figures=[SweepFigure.of(DECLARED), SweepFigure.of({**DECLARED, "panel": None, "published": None})])
    figures = json.loads((tmp_path / "summary.json").read_text())["figures"]
    assert [figure["title"] for figure in figures] == ["Throughput & <more>"] * 2 and figures[0]["gain"]["of"] == "graphpipe"
    for name in ("figure.svg", "figure_2.svg"):
        ElementTree.parse(tmp_path / name)
    page = parse((tmp_path / "report.html").read_text())
    assert page.words.count("pipedream") >= 2 and page.words.count("why") == 2


def test_without_a_single_result_there_is_no_picture(tmp_path: Path) -> None:
    figure = SweepFigure.of(DECLARED)
    assert figure_svg(figure.evaluate([])) == ""
    assert figure_svg(figure.evaluate([job("mmt", "graphpipe", "summit_1x4", None)])) == ""
    write_sweep(tmp_path, [], figures=[figure])
    assert not (tmp_path / "figure.svg").exists()
    parse((tmp_path / "report.html").read_text())


def test_overrides_are_columns() -> None:
    jobs = [job("mmt", "graphpipe", "c", float(b), overrides={"microbatch_size": str(b), "model": "mmt_paper"}) for b in (4, 16)]
    figure = SweepFigure.of({"title": "t", "x": "microbatch_size", "y": "predicted.iteration_s", "panel": "override.model"})
    data = figure.evaluate(jobs)
    assert data.places("mmt_paper") == ["4", "16"]


def test_strategies_compared_in_one_job_are_told_apart() -> None:
    one = job("mmt", "graphpipe", "summit_1x4", 60.0)
    found = [{key: j.result[key] for key in ("strategy", "status", "predicted")} for j in (one, job("mmt", "piper", "", 40.0))]
    data = SweepFigure.of(DECLARED).evaluate([replace(one, result={**one.result, "compared": found})])
    assert [gain.ours for gain in data.gains if gain.x == "4"] == [pytest.approx(1.5)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"chart": "pie"}, "chart"),
        ({"colour": "red"}, "colour"),
        ({"over": []}, "over"),
        ({"average": "mode"}, "average"),
        ({"average": "mean", "normalise": ["piper"]}, "average"),
        ({"published": {"mmt": {"graphpipe": 3}}}, "published"),
    ],
)
def test_a_wrong_declaration_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        SweepFigure.of({**DECLARED, **change})


def test_a_figure_needs_its_axes() -> None:
    with pytest.raises(InvalidConfig, match="needs it"):
        SweepFigure.of({"title": "t", "x": "cluster"})
