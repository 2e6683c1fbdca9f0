import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gpp.report.run.record import RunRecord
from gpp.report.sweep.files import summarise, write_sweep
from gpp.report.sweep.jobs import Job, parse_overrides, read_jobs
from tests.support.page_check import parse


def put(directory: Path, name: str, overrides: list[str], result: dict[str, Any] | str | None) -> None:
    (directory / name / ".hydra").mkdir(parents=True)
    (directory / name / ".hydra" / "overrides.yaml").write_text("".join(f"- {o}\n" for o in overrides) or "[]\n")
    if result is not None:
        (directory / name / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
        (directory / name / "report.html").write_text("")


def of(run: RunRecord, factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    result = copy.deepcopy(run.result)
    for source in ("predicted", "measured"):
        result[source]["iteration_s"] = factor
    return {**result, **changes}


@pytest.fixture
def sweep(tmp_path: Path, run4: RunRecord) -> Path:
    for seed, factor in enumerate((1.0, 3.0, 2.0)):
        put(
            tmp_path,
            str(seed),
            ["strategy=sequential", f"seed={seed}", "optimizer.lr=0.1"],
            of(run4, factor, strategy="sequential", seed=seed),
        )
    for seed, factor in enumerate((0.5, 0.5, 4.0)):
        put(
            tmp_path,
            str(3 + seed),
            ["strategy=graphpipe", f"seed={seed}", "optimizer.lr=0.1"],
            of(run4, factor, strategy="graphpipe", seed=seed),
        )
    put(
        tmp_path,
        "6",
        ["strategy=piper"],
        of(run4, strategy="piper", status="infeasible", reason="too big", plan=None, predicted=None, measured=None),
    )
    put(
        tmp_path,
        "7",
        ["strategy=deepspeed"],
        of(run4, strategy="deepspeed", status="failed", reason="worker 1\nTraceback", measured=None),
    )
    put(tmp_path, "8", ["strategy=piper", "model=dlrm"], None)
    put(tmp_path, "9", ["strategy=piper"], "{ half")
    put(tmp_path, "10", ["strategy=piper"], "[1]")
    (tmp_path / "notes").mkdir()
    return tmp_path


def rows_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_results_csv(sweep: Path, run4: RunRecord) -> None:
    write_sweep(sweep)
    rows = rows_of(sweep)
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["infeasible", "failed", "failed", "failed", "failed"]
    assert [row["strategy"] for row in rows[:7]] == ["sequential"] * 3 + ["graphpipe"] * 3 + ["piper"]
    assert float(rows[1]["measured.iteration_s"]) == 3.0 and rows[6]["measured.iteration_s"] == ""
    assert json.loads(rows[0]["loss"]) == run4.result["loss"]
    assert rows[0]["predicted.peak_memory_bytes.0"] and rows[0]["plan.microbatch_sizes.0"] == "4"
    assert "no result.json" in rows[8]["reason"] and rows[8]["model"] == "dlrm"
    assert "9/result.json:1:3: is no JSON" in rows[9]["reason"]
    header = list(rows[0])
    assert len(header) == len(set(header)) and header[-1] == "optimizer.lr"
    assert header.index("predicted.iteration_s") < header.index("measured.iteration_s") < header.index("optimizer.lr")
    assert "plan" not in header and "measured" not in header


def test_summary(sweep: Path) -> None:
    write_sweep(sweep)
    summary = json.loads((sweep / "summary.json").read_text())
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
        Job(
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
        jobs.append(Job(name=strategy, overrides={"strategy": strategy}, result=result))
    summary = summarise(jobs)
    assert [g["prediction_error"] for g in summary["groups"]] == pytest.approx([0.1, 0.05])
    assert summary["errors"]["iteration_s"] == pytest.approx({"median": 0.075, "max": 0.1})
    assert summary["errors"]["speedup_over_sequential"] == pytest.approx(dict.fromkeys(("median", "max"), 2.2 / 1.05 / 2.0 - 1))
    assert summarise([])["errors"]["iteration_s"] == {"median": None, "max": None}


def test_a_strategy_with_its_own_engine_is_compared_too(run4: RunRecord) -> None:
    jobs = [
        Job(name="0", overrides={}, result=of(run4, 2.0, strategy="sequential", engine="distributed")),
        Job(name="1", overrides={}, result=of(run4, 1.0, strategy="deepspeed", engine="deepspeed")),
    ]
    assert summarise(jobs)["groups"][1]["speedup_over_sequential"]["measured"] == 2.0


def test_page(sweep: Path) -> None:
    write_sweep(sweep, title="figure <6>")
    page = (sweep / "report.html").read_text()
    words = " ".join(parse(page).words)
    assert "figure <6>" in words and 'href="0/report.html"' in page and 'href="8/report.html"' not in page
    assert "no result.json" in words and "graphpipe" in words and page.count("<svg") >= 1


def test_jobs_given_by_the_caller(sweep: Path) -> None:
    jobs = read_jobs(sweep, [("4", ["a=1"]), (sweep / "0", ["a=2"]), ("missing", ["strategy=x"])])
    assert [job.name for job in jobs] == ["4", "0", "missing"] and [job.overrides for job in jobs[:2]] == [
        {"a": "1"},
        {"a": "2"},
    ]
    assert jobs[2].result["status"] == "failed" and jobs[2].result["strategy"] == "x"


def test_an_empty_sweep(tmp_path: Path) -> None:
    assert write_sweep(tmp_path) == []
    assert json.loads((tmp_path / "summary.json").read_text())["num_jobs"] == 0
    parse((tmp_path / "report.html").read_text())


def test_an_override_that_differs_from_the_result_has_its_column(tmp_path: Path, run4: RunRecord) -> None:
    put(tmp_path, "0", ["model=towers_small", "cluster=summit_1x10"], of(run4))
    write_sweep(tmp_path)
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


def test_jobs_in_named_directories(tmp_path: Path, run4: RunRecord) -> None:
    put(tmp_path, "a/b", ["x=1"], of(run4))
    put(tmp_path, "job10", ["x=3"], of(run4))
    put(tmp_path, "job9", ["x=2"], of(run4))
    assert [job.name for job in read_jobs(tmp_path)] == ["a/b", "job9", "job10"]


def test_a_relative_directory(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep.parent)
    assert [job.result for job in write_sweep(sweep.name)] == [job.result for job in write_sweep(sweep)]
