"""mode=export and layouts on the command line, with an exporter of a user's own: one file and one YAML, nothing in gpp/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpp.plan.plan import Plan
from gpp.runtime.engine import Progress
from gpp.serialization import from_json, read_json
from gpp.ui.bench import Bench
from tests.support.cli import run
from tests.support.one_process import answered

OWN = Path(__file__).parent / "conf"
MODEL = ("model=gpt_small", "model.num_layers=2", "cluster=summit_1x4", "minibatch_size=32", "microbatch_size=4", "explain_s=0")


def test_a_layout_is_read_and_written_by_an_exporter_of_ones_own(tmp_path: Path) -> None:
    given = tmp_path / "stages.txt"
    given.write_text("stage: embed layers.0\nstage: layers.1 norm head\n")
    out = run(tmp_path / "run", "-cd", str(OWN), *MODEL, "export=stage_list", "strategy=even", "mode=export", f"plan={given}")
    assert out.code == 0, out.out
    folder = tmp_path / "run" / "export" / "stage_list"
    assert (folder / "stages.txt").read_text() == given.read_text()
    page = (folder / "PLAN.md").read_text()
    assert "for an engine of mine" in page and "## Memory of each rank" in page and "tokens a second" in page


def test_a_layout_stays_when_its_times_are_taken_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stays: list[bool] = []
    monkeypatch.setattr("gpp.app.in_place.renewed", lambda problem, *_: problem)
    monkeypatch.setattr("gpp.app.in_place.settle", lambda *of, given, **_: stays.append(given) or of[:2])
    for more in ("plan='Et|tL'",), ():
        words = ["logger=none", "model=gpt_small", f"hydra.run.dir={tmp_path}/run", *more]
        answered(words, lambda experiment, _: experiment.in_place(None, None, None, Progress()), monkeypatch)
    assert stays == [True, False]


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for words, said in (
        (("mode=export",), "mode=export writes for one engine"),
        (("mode=train", "export=megatron"), "mode=train neither writes files for it nor plans for it alone"),
        (("mode=plan", "export=vllm"), "takes plans of mode=inference"),
        (("mode=plan", "export=megatrom"), "megatron"),
        (("mode=plan", "plan='Et|t|ttL'"), "has 4 layers, and the model has 2"),
    ):
        out = run(tmp_path / "refused", *MODEL, *words)
        assert out.code == 2 and said in out.out, out.out


def test_a_plan_under_an_engines_rules_is_the_one_that_is_written(tmp_path: Path) -> None:
    """`mode=plan export=` says what `mode=export` writes, and no nearest plan is needed for the same plan."""
    words = (*MODEL, "export=torchtitan", "export.config=my.own.llama", "strategy=even")
    planned = run(tmp_path / "plan", *words, "mode=plan")
    assert planned.code == 0 and "Planned for torchtitan, under its rules" in planned.out, planned.out
    found = json.loads((tmp_path / "plan" / "result.json").read_text())
    out = run(tmp_path / "export", *words, "mode=export", "export.nearest=true")
    assert out.code == 0, out.out
    page = (tmp_path / "export" / "export" / "torchtitan" / "PLAN.md").read_text()
    assert "nearest plan" in page and f"| step | {1e3 * found['predicted']['iteration_s']:.2f} ms |" in page
    stages = read_json(Plan, tmp_path / "plan" / "job" / "plan.json").stages
    assert len(re.findall(r"\n\| s\d+ \|", page)) == len(stages)
    for name in ("plan", "export"):  # the page of either opens with that plan, and changes it under the engine's rules
        bench = Bench.of(tmp_path / name)
        opened = bench.answer({"state": list(bench.start)})
        assert from_json(Plan, opened["json"]).stages == stages and opened["step_s"] == found["predicted"]["iteration_s"]
        assert bench.page()["rules"] == "torchtitan"
    bench = Bench.of(tmp_path / "plan")
    fewer = bench.answer({"state": [1, *bench.start[1:]], "near": bench.near})
    bench.answer({"state": [1, *bench.start[1:]], "plan": fewer["json"], "export": "torchtitan"})
    assert "from my.own import llama" in (tmp_path / "plan" / "export" / "torchtitan" / "planned.py").read_text()
