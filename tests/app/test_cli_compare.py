"""mode=compare and mode=plan from the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpp.analysis.explain.explanation import Explanation
from gpp.plan.plan import Plan
from gpp.serialization import read_json
from tests.support.cli import ROOT, run

SMALL = ["model=mmt_small", "model.num_branches=2", "model.num_layers=2", "cost=analytical", "cluster.num_devices=2", "logger=none"]
COMPARE = ["mode=compare", *SMALL]
APART = "strategy.planner.colocate=never"
"""There is no bound on plans whose stages share devices."""


def test_a_comparison_from_the_shell(tmp_path: Path) -> None:
    done = run(tmp_path, *COMPARE, "strategies=[even,graphpipe,sequential]", "strategy.planner.patience=2", APART)
    assert done.code == 0, done.out
    result = done.result
    assert [each["strategy"] for each in result["compared"]] == ["even", "graphpipe", "sequential"]
    best = min(result["compared"], key=lambda each: each["predicted"]["iteration_s"])
    assert result["strategy"] == best["strategy"] and result["predicted"] == best["predicted"] and result["plan"] == best["plan"]
    assert result["status"] == "ok" and result["measured"] is None and best["relative_to_best"] == 1
    chain, alone = result["gains"]
    chain_s = result["compared"][-1]["predicted"]["iteration_s"]
    assert chain["rival_iteration_s"] == pytest.approx(chain_s) and chain["iteration_s"] == best["predicted"]["iteration_s"]
    assert alone["over"] == "one device" and not alone["measured"]
    assert result["plan"]["optimality_gap"] == pytest.approx(
        result["predicted"]["iteration_s"] / result["plan"]["lower_bound_s"] - 1
    )
    for name in ("even", "graphpipe", "sequential"):
        assert read_json(Plan, tmp_path / "plans" / f"{name}.json").minibatch_size == 64
        assert name in done.out
    assert "strategy.planner.patience=2" in (tmp_path / "report.html").read_text()


def test_the_default_list_and_what_does_not_fit(tmp_path: Path) -> None:
    words = ["mode=compare", "model=random", "model.num_ops=4", "cluster=summit_1x4", "minibatch_size=4", "logger=none"]
    done = run(tmp_path, *words, "cluster.memory_bytes=1e3")
    assert done.code == 3, done.out
    result = done.result
    names = [each["strategy"] for each in result["compared"]]
    assert names[0] == "graphpipe" and {"sequential", "even"} <= set(names)
    assert result["status"] == "infeasible" and result["plan"] is None
    assert all(each["status"] == "infeasible" and each["reason"] for each in result["compared"])


def test_the_largest_micro_batch_of_each_strategy(tmp_path: Path) -> None:
    words = ["mode=max_batch", *SMALL, "strategies=[sequential,pipedream]", "minibatch_size=32", "microbatch_size=8"]
    done = run(tmp_path, *words, "cluster.memory_bytes=2e7", "strategy.planner.replication=false")
    assert done.code == 0, done.out
    sequential, pipedream = done.result["max_batch"]
    assert [each["strategy"] for each in (sequential, pipedream)] == ["sequential", "pipedream"]
    assert (sequential["microbatches"], pipedream["microbatches"]) == (4, 1)
    for each, compared in zip(done.result["max_batch"], done.result["compared"], strict=True):
        assert each["microbatch_size"] < each["refused"] <= max(each["microbatch_size"] * 1.04, each["microbatch_size"] + 1)
        assert each["minibatch_size"] == each["microbatch_size"] * each["microbatches"] == compared["plan"]["minibatch_size"]
        assert max(compared["predicted"]["peak_memory_bytes"].values()) <= 2e7 and "no plan found fits" in each["reason"]
        assert each["throughput_samples_per_s"] == compared["predicted"]["throughput_samples_per_s"] and each["confirmed"] is None
        assert read_json(Plan, tmp_path / "plans" / f"{each['strategy']}.json").minibatch_size == each["minibatch_size"]
        assert f" {each['microbatch_size']} " in done.out
    page = (tmp_path / "report.html").read_text()
    assert "Largest micro-batches" in page and "refused" in page
    assert done.result["plan"]["lower_bound_s"] is None


def test_strategies_that_do_not_drain_stand_beside_those_that_do(tmp_path: Path) -> None:
    names = ["graphpipe", "pipedream", "pipedream_2bw", "spectrain", "pipeoptim"]
    done = run(tmp_path, *COMPARE, f"strategies=[{','.join(names)}]", APART)
    assert done.code == 0, done.out
    found = {each["strategy"]: each for each in done.result["compared"]}
    assert list(found) == names and all(each["status"] == "ok" for each in found.values()), done.out
    stale = {name: max(each["predicted"]["staleness"].values()) for name, each in found.items()}
    assert stale["graphpipe"] == 0 and stale["pipedream_2bw"] == 1
    assert [name for name, each in found.items() if each["plan"]["optimality_gap"] is not None] == ["graphpipe"]
    assert "stale" in done.out
    # The best of the two kinds are told apart.
    times = {name: each["predicted"]["iteration_s"] for name, each in found.items()}
    late = min(names[1:], key=lambda name: times[name])
    assert done.result["best"] == {"synchronous": "graphpipe", "asynchronous": late} and done.result["strategy"] == "graphpipe"
    assert "best synchronous: graphpipe" in done.out and f"best asynchronous: {late}" in done.out


def test_weights_are_for_all_too(tmp_path: Path) -> None:
    words = ["strategies=[sequential,even]", "strategy/weights=stash", "strategy/schedule=no_flush"]
    done = run(tmp_path, *COMPARE, *words)
    assert done.code == 0, done.out
    assert all(each["plan"]["microbatch_sizes"] and each["plan"]["optimality_gap"] is None for each in done.result["compared"])


def test_a_plan_is_explained(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "mode=plan", APART)
    assert done.code == 0, done.out
    found = read_json(Explanation, tmp_path / "explanation.json")
    assert found.iteration_s == done.result["predicted"]["iteration_s"]
    assert found.bound.iteration_s == done.result["plan"]["lower_bound_s"] <= found.iteration_s
    for words in ("why ", "the bottleneck is s", "twice the devices", "from optimal (bound"):
        assert words in done.out
    given = run(tmp_path / "given", *SMALL, "mode=plan", f"plan={tmp_path / 'job' / 'plan.json'}")
    assert given.code == 0 and "this plan was given, or planned" in given.out


def imported(words: list[str], modules: list[str]) -> list[str]:
    """Those of some modules that a command imports."""
    code = (
        "import json, runpy, sys\n"
        f"sys.argv = ['run.py', *{words!r}]\n"
        "try:\n    runpy.run_path('run.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"print(json.dumps([m for m in {modules!r} if m in sys.modules]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_torch_with_a_warm_cache(tmp_path: Path) -> None:
    words = [*COMPARE, "strategies=[graphpipe,sequential,even]"]
    assert run(tmp_path / "cold", *words).code == 0
    heavy, pages = ["torch", "wandb", "scipy", "rich.progress"], ["gpp.report.compare.page", "gpp.ui.views"]
    assert imported([*words, f"hydra.run.dir={tmp_path / 'warm'}"], heavy + pages) == pages[:1]


UNUSED = [
    "gpp.analysis.max_batch",
    "gpp.analysis.one_stage",
    "gpp.app.in_place",
    "gpp.app.measuring",
    "gpp.app.replanning",
    "gpp.app.surveys",
    "gpp.app.tracked",
    "gpp.formats.pipeedge.files",
    "gpp.formats.profiles",
    "gpp.loggers.jsonl",
    "gpp.mechanisms.marks.fit",
    "gpp.mechanisms.tensor_parallel.searching",
    "gpp.planners.common.heterogeneous_chain",
    "gpp.planners.graphpipe.vary",
    "gpp.report.compare.page",
    "gpp.report.run.profile",
    "gpp.report.sweep.jobs",
    "gpp.runtime.engines.distributed",
    "gpp.runtime.rehearsal.rehearse",
    "gpp.runtime.worker.parent",
    "gpp.mechanisms.split_backward.schedules.optimal",
    "multiprocessing",
    "networkx",
    "numpy.ma",
    "scipy",
    "torch",
    "wandb",
]
"""Modules that other modes need: a plan on a simulated cluster of equal devices imports none of them."""


def test_a_plan_imports_what_it_needs(tmp_path: Path) -> None:
    words = ["mode=plan", "model=random", "model.num_ops=16", "graph.max_ops=8", "cluster=summit_1x4"]
    words += ["logger=none", "explain_s=0"]
    assert [name for name in UNUSED if name.startswith("gpp.") and find_spec(name) is None] == []
    assert imported([*words, f"hydra.run.dir={tmp_path / 'plan'}"], UNUSED) == []


def test_a_mode_that_is_gone_names_what_took_its_place(tmp_path: Path) -> None:
    done = run(tmp_path, "mode=explore", "model=random")
    assert done.code == 2 and "error: mode=explore: is gone" in done.out and "start gpp ui on its directory" in done.out


def test_a_plan_with_helpers_is_predicted_kept_and_not_emulated(tmp_path: Path) -> None:
    chain = ["model=random", "model.kind=chain", "model.num_ops=5", "cluster=summit_1x4", "logger=none", "strategy=layerpipe"]
    planned = run(tmp_path / "planned", *chain, "mode=plan", "explain_s=0", "minibatch_size=8")
    assert planned.code == 0, planned.out
    file = tmp_path / "planned" / "job" / "plan.json"
    plan = read_json(Plan, file)
    assert plan.periodic and f"W on d{next(s.adding[0] for s in plan.stages if s.adding)}" in planned.out
    # Whether input gradients can be divided is asked where workers could run the plan, which are on processors.
    assert plan.predicted_only != (file.parent / "program.txt").exists()
    again = run(tmp_path / "again", *chain, "mode=plan", "explain_s=0", "minibatch_size=8", f"plan={file}")
    assert again.code == 0 and again.result["predicted"] == planned.result["predicted"], again.out
    for words in ([], [f"plan={file}"]):
        refused = run(tmp_path / "refused", *chain, "mode=train", "engine=emulate", *words)
        message = "engine=emulate: does not have devices make parts of other devices' backwards"
        assert refused.code == 2 and message in refused.out and not (tmp_path / "refused").exists()
