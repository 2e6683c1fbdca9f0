import copy
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpp.report.run.record import RunRecord
from gpp.report.sweep.files import summarise, write_sweep
from gpp.report.sweep.jobs import AskedJob, SweepJob, parse_overrides, read_jobs
from tests.support.page_check import parse


def put(directory: Path, name: str, overrides: list[str], result: dict[str, Any] | str | None) -> AskedJob:
    """A job in a sweep's directory; its configuration is called like its folder."""
    (directory / name).mkdir(parents=True)
    if result is not None:
        text = result if isinstance(result, str) else json.dumps({**result, "configuration": name})
        (directory / name / "result.json").write_text(text)
        (directory / name / "report.html").write_text("")
    return AskedJob(folder=name, overrides=tuple(overrides), configuration=name)


def of(run: RunRecord, factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    result = copy.deepcopy(run.result)
    for source in ("predicted", "measured"):
        result[source]["iteration_s"] = factor
    return {**result, **changes}


@pytest.fixture
def asked(tmp_path: Path, run4: RunRecord) -> list[AskedJob]:
    out = [
        put(
            tmp_path,
            str(first + seed),
            [f"strategy={strategy}", f"seed={seed}", "optimizer.lr=0.1"],
            of(run4, factor, strategy=strategy, seed=seed),
        )
        for strategy, first, factors in (("sequential", 0, (1.0, 3.0, 2.0)), ("graphpipe", 3, (0.5, 0.5, 4.0)))
        for seed, factor in enumerate(factors)
    ]
    too_big = of(run4, strategy="piper", status="infeasible", reason="too big", plan=None, predicted=None, measured=None)
    broken = of(run4, strategy="deepspeed", status="failed", reason="worker 1\nTraceback", measured=None)
    out.append(put(tmp_path, "6", ["strategy=piper"], too_big))
    out.append(put(tmp_path, "7", ["strategy=deepspeed"], broken))
    out.append(put(tmp_path, "8", ["strategy=piper", "model=dlrm"], None))
    out.append(put(tmp_path, "9", ["strategy=piper"], "{ half"))
    out.append(put(tmp_path, "10", ["strategy=piper"], "[1]"))
    (tmp_path / "notes").mkdir()
    return out


def rows_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_results_csv(tmp_path: Path, asked: list[AskedJob], run4: RunRecord) -> None:
    write_sweep(tmp_path, asked)
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["infeasible", "failed", "failed", "failed", "failed"]
    assert [row["strategy"] for row in rows[:7]] == ["sequential"] * 3 + ["graphpipe"] * 3 + ["piper"]
    assert float(rows[1]["measured.iteration_s"]) == 3.0 and rows[6]["measured.iteration_s"] == ""
    assert json.loads(rows[0]["loss"]) == run4.result["loss"]
    assert rows[0]["predicted.peak_memory_bytes.0"] and rows[0]["plan.microbatch_sizes.0"] == "4"
    assert "no result" in rows[8]["reason"] and rows[8]["model"] == "dlrm"
    assert "result.json:1:3: is no JSON" in rows[9]["reason"]
    header = list(rows[0])
    assert len(header) == len(set(header)) and header[-1] == "optimizer.lr"
    assert header.index("predicted.iteration_s") < header.index("measured.iteration_s") < header.index("optimizer.lr")
    assert "plan" not in header and "measured" not in header


def test_summary(tmp_path: Path, asked: list[AskedJob]) -> None:
    write_sweep(tmp_path, asked)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_jobs"] == 11 and summary["counts"] == {"ok": 6, "infeasible": 1, "failed": 4}
    groups = {(g["model"], g["strategy"]): g for g in summary["groups"] if g["counts"]["ok"]}
    assert groups["towers4", "sequential"]["measured"]["iteration_s"] == 2.0
    assert groups["towers4", "graphpipe"]["measured"]["iteration_s"] == 0.5
    assert groups["towers4", "graphpipe"]["speedup_over_sequential"] == {"predicted": 4.0, "measured": 4.0}
    assert groups["towers4", "graphpipe"]["jobs"] == ["3", "4", "5"]
    infeasible = next(g for g in summary["groups"] if g["counts"]["infeasible"])
    assert infeasible["reason"] == "too big" and infeasible["measured"] is None


def test_other_overrides_are_groups_of_their_own(run4: RunRecord) -> None:
    jobs = [
        SweepJob(
            name=str(i),
            overrides={"strategy": s, "minibatch_size": str(b), "seed": str(i)},
            result=of(run4, float(b) / (1 + (s != "sequential")), strategy=s),
        )
        for i, (s, b) in enumerate([("sequential", 32), ("graphpipe", 32), ("sequential", 64), ("graphpipe", 64)])
    ]
    groups = summarise(jobs)["groups"]
    assert len(groups) == 4
    assert [g["speedup_over_sequential"]["measured"] for g in groups] == [1.0, 2.0, 1.0, 2.0]


def test_how_far_what_was_measured_is_from_what_was_predicted(run4: RunRecord) -> None:
    took = {"sequential": (2.0, 2.2), "graphpipe": (1.0, 1.05)}
    jobs = []
    for strategy, (predicted, measured) in took.items():
        result = of(run4, predicted, strategy=strategy, prediction_error=measured / predicted - 1)
        result["measured"]["iteration_s"] = measured
        jobs.append(SweepJob(name=strategy, overrides={"strategy": strategy}, result=result))
    summary = summarise(jobs)
    assert [g["prediction_error"] for g in summary["groups"]] == pytest.approx([0.1, 0.05])
    assert summary["errors"]["iteration_s"] == pytest.approx({"median": 0.075, "max": 0.1})
    assert summary["errors"]["speedup_over_sequential"] == pytest.approx(dict.fromkeys(("median", "max"), 2.2 / 1.05 / 2.0 - 1))
    assert summarise([])["errors"]["iteration_s"] == {"median": None, "max": None}


def test_a_strategy_with_its_own_engine_is_compared_too(run4: RunRecord) -> None:
    jobs = [
        SweepJob(name="0", overrides={}, result=of(run4, 2.0, strategy="sequential", engine="distributed")),
        SweepJob(name="1", overrides={}, result=of(run4, 1.0, strategy="deepspeed", engine="deepspeed")),
    ]
    assert summarise(jobs)["groups"][1]["speedup_over_sequential"]["measured"] == 2.0


def test_page(tmp_path: Path, asked: list[AskedJob]) -> None:
    write_sweep(tmp_path, asked, title="figure <6>")
    page = (tmp_path / "report.html").read_text()
    words = " ".join(parse(page).words)
    assert "figure <6>" in words and 'href="0/report.html"' in page and 'href="8/report.html"' not in page
    assert "no result" in words and "graphpipe" in words and page.count("<svg") >= 1


def test_only_the_jobs_that_are_asked_for_count(tmp_path: Path, asked: list[AskedJob]) -> None:
    """Of a directory with the results of other sweeps, or of an older version of this one."""
    missing = AskedJob(folder="missing", overrides=("strategy=x",), configuration="missing")
    jobs = read_jobs(tmp_path, [asked[4], asked[0], missing], why="the sweep was stopped by SIGTERM")
    assert [job.name for job in jobs] == ["4", "0", "missing"]
    assert [job.result["status"] for job in jobs] == ["ok", "ok", "failed"] and jobs[2].result["strategy"] == "x"
    assert "stopped by SIGTERM" in jobs[2].result["reason"]
    write_sweep(tmp_path, asked[:2])
    assert len(rows_of(tmp_path)) == 2 and json.loads((tmp_path / "summary.json").read_text())["num_jobs"] == 2


def test_a_result_of_another_configuration_is_none(tmp_path: Path, asked: list[AskedJob]) -> None:
    (job,) = read_jobs(tmp_path, [replace(asked[0], configuration="other")])
    assert job.result["status"] == "failed" and "another configuration" in job.result["reason"]
    assert job.result["measured"] is None


def test_an_empty_sweep(tmp_path: Path) -> None:
    assert write_sweep(tmp_path, []) == []
    assert json.loads((tmp_path / "summary.json").read_text())["num_jobs"] == 0
    parse((tmp_path / "report.html").read_text())


def test_an_override_that_differs_from_the_result_has_its_column(tmp_path: Path, run4: RunRecord) -> None:
    job = put(tmp_path, "0", ["model=towers_small", "cluster=summit_1x10"], of(run4))
    write_sweep(tmp_path, [job])
    row = rows_of(tmp_path)[0]
    assert row["model"] == "towers4" and row["override.model"] == "towers_small" and "override.cluster" not in row


def test_parse_overrides() -> None:
    assert parse_overrides(["strategy=graphpipe", "+x.y=a=b", "++z=1", "~w", "strategy/schedule=gpipe"]) == {
        "strategy": "graphpipe",
        "x.y": "a=b",
        "z": "1",
        "w": "",
        "strategy/schedule": "gpipe",
    }


def test_a_relative_directory(tmp_path: Path, asked: list[AskedJob], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    assert [job.result for job in write_sweep(tmp_path.name, asked)] == [job.result for job in write_sweep(tmp_path, asked)]
