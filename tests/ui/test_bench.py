"""What a run's page asks is answered by the run's own problem and strategy; config.yaml chooses no code."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpp import Even, GPipe, Plan
from gpp.cost.overheads import NOTHING, Overheads
from gpp.errors import InvalidConfig
from gpp.runtime.job import Job
from gpp.schedules.forward_only import ForwardOnly
from gpp.serialization import from_json, read_json, to_json
from gpp.ui import moved
from gpp.ui.bench import AUTO, EXPORTERS, Bench, PlanQuestion, question, schedules_offered
from gpp.ui.moved import moves
from gpp.ui.settings import FACTORIES, restored
from tests.support.conf import CONF
from tests.support.graphs import within


def state(bench: Bench, **words: str) -> list[int]:
    """The positions of these values, the others as the run has them."""
    out = list(bench.start)
    for position, control in enumerate(bench.controls):
        if control.key in words:
            out[position] = list(control.values).index(words[control.key])
    return out


def answer(bench: Bench, *, whole: bool = True, **words: str) -> dict[str, Any]:
    return bench.answer(PlanQuestion(state=state(bench, **words), whole=whole))


def test_the_start_is_the_plan_of_the_run(bench: Bench, folder: Path) -> None:
    found, kept = answer(bench), read_json(Plan, folder / "towers" / "graphpipe" / "job" / "plan.json")
    plan = from_json(Plan, found["json"])
    assert (plan.stages, plan.edges) == (kept.stages, kept.edges)
    result = json.loads((folder / "towers" / "graphpipe" / "result.json").read_text())
    assert found["step_s"] == result["predicted"]["iteration_s"] and result["schedule"] == "1f1b"
    assert not found["more"] and found["plan"]["drawing"].startswith("<svg")
    page = bench.page()
    assert page["meanings"].keys() == {*bench.strategies, *bench.schedules} and all(page["meanings"].values())
    assert page["exporters"] == list(EXPORTERS) and json.loads(json.dumps(page)) is not None


def test_the_start_is_no_new_plan(bench: Bench, folder: Path, tmp_path: Path) -> None:
    """A plan that no search would find is what the page opens with, and comes back to."""
    shutil.copytree(folder / "towers" / "graphpipe", tmp_path / "run")
    halves = replace(bench.experiment.strategy, planner=Even()).plan(bench.problem)
    (tmp_path / "run" / "job" / "plan.json").write_text(to_json(halves))
    again = Bench.of(tmp_path / "run")
    for whole in (False, True):
        found = answer(again, whole=whole)
        assert from_json(Plan, found["json"]).stages == halves.stages and not found["more"]
    assert found["step_s"] > answer(bench)["step_s"] and again.near == halves.stages[0].microbatch_size
    assert answer(again, strategy="sequential")["step_s"] == answer(bench, strategy="sequential")["step_s"]


def test_fixed_costs_of_actions_are_those_of_the_run(bench: Bench, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "towers" / "graphpipe", tmp_path / "run")
    job = Job.load(tmp_path / "run")
    assert job.overheads == bench.problem.overheads == NOTHING
    measured = replace(job, overheads=Overheads(forward_s=1e-3, step_s=2e-3))
    measured.save(tmp_path / "run", {})
    assert Job.load(tmp_path / "run") == measured
    again = Bench.of(tmp_path / "run")
    assert again.problem.overheads == measured.overheads
    known = [one.experiment.strategy.predict(job.plan, one.problem).metrics.iteration_s for one in (bench, again)]
    assert known[1] > known[0] + 2e-3
    job.save(tmp_path / "run", {})
    assert Job.load(tmp_path / "run") == job


def test_changed_settings_are_planned_by_the_real_planner(bench: Bench, folder: Path) -> None:
    for words in (
        {"devices": "2", "microbatch": "4"},
        {"strategy": "sequential", "schedule": "gpipe"},
        {"strategy": "sequential", "schedule": "zero_bubble_h1", "devices": "3"},
    ):
        found = answer(bench, **words)
        plan = from_json(Plan, found["json"])
        assert plan.num_devices <= int(words.get("devices", "4"))
        assert "microbatch" not in words or {stage.microbatch_size for stage in plan.stages} == {4}
        strategy, problem = bench._posed(state(bench, **words))
        assert found["step_s"] == strategy.predict(strategy.plan(problem), problem).metrics.iteration_s
    chain = json.loads((folder / "towers" / "sequential" / "result.json").read_text())
    assert answer(bench, strategy="sequential")["step_s"] == chain["predicted"]["iteration_s"]
    assert bench.controls[1].values[0] == AUTO and list(bench.controls[0].values) == ["1", "2", "3", "4"]


def test_the_timeline_that_is_drawn_has_the_bubble_that_is_said(bench: Bench) -> None:
    for words in ({}, {"strategy": "sequential", "schedule": "zero_bubble_h1"}):
        found = answer(bench, **words)
        line = found["timeline"]
        (panel,) = line["panels"]
        numbers = list(_numbers(zlib.decompress(base64.b64decode(panel["packed"]), -15)))
        busy, at = 0.0, 0
        for _ in line["rows"]:
            count = numbers[at]
            lengths, codes = (numbers[at + 1 + count * n : at + 1 + count * (n + 1)] for n in (1, 2))
            at += 1 + 4 * count
            for length, code in zip(lengths, codes, strict=True):
                kind = line["kinds"][panel["table"][code][1]]["text"]
                busy += length * line["tick_s"] if kind in ("F", "B", "I", "W") else 0.0
        assert at == len(numbers)
        assert 1 - busy / (len(line["rows"]) * found["step_s"]) == pytest.approx(found["bubble"], abs=1e-4)


def _numbers(stream: bytes) -> Iterator[int]:
    """LEB128: seven bits a byte, the lowest first."""
    value = shift = 0
    for byte in stream:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0


def test_a_quick_answer_says_that_there_is_more(bench: Bench) -> None:
    quick, whole = answer(bench, whole=False, devices="3"), answer(bench, devices="3")
    assert quick["more"] and not whole["more"] and quick["step_s"] >= whole["step_s"]
    assert not answer(bench, whole=False, strategy="sequential")["more"]  # without a size to keep to it has no quick form
    near = bench.answer(PlanQuestion(state=state(bench, strategy="sequential"), near=2))
    assert near["more"] and near["size"] == 2 and bench.near == answer(bench)["size"]


def test_too_little_memory_is_a_reason_at_once_and_then_in_numbers(bench: Bench) -> None:
    _, problem = bench._posed(state(bench, memory=bench.controls[2].values[0]))
    memory = [[device.memory_bytes for device in each.cluster.devices] for each in (problem, bench.problem)]
    assert memory[0] == pytest.approx([least / 64 for least in memory[1]], rel=5e-3)
    tight = replace(bench, problem=within(bench.problem, 1.0))
    quick, whole = answer(tight, whole=False, strategy="sequential"), answer(tight, strategy="sequential")
    assert quick["status"] == whole["status"] == "infeasible" and quick["more"] and not whole["more"]
    assert "Smallest change that fits" in whole["reason"] and quick["reason"].rstrip(".") in whole["reason"]


def test_every_move_that_is_offered_gives_a_plan_that_is_right(bench: Bench, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "towers" / "graphpipe", tmp_path / "run")
    halves = replace(bench.experiment.strategy, planner=Even()).plan(bench.problem)  # its stages hold several operators
    (tmp_path / "run" / "job" / "plan.json").write_text(to_json(halves))
    bench = Bench.of(tmp_path / "run")
    strategy, problem = bench._posed(state(bench))
    start = answer(bench)
    plan, graph = from_json(Plan, start["json"]), bench.problem.graph
    offered = [move for own in moves(plan, graph) for move in own]
    assert offered and [(op, to) for op, _, to, _ in start["moves"]] == [tuple(move) for move in offered]
    for op, to in offered:
        found = bench.answer(PlanQuestion(state=state(bench), plan=start["json"], move=[op, to]))
        changed = from_json(Plan, found["json"])
        assert op in changed.stages[to].ops
        assert [set(s.ops) - {op} for s in changed.stages] == [set(s.ops) - {op} for s in plan.stages]
        assert [s.devices for s in changed.stages] == [s.devices for s in plan.stages]
        strategy.check(changed, problem)
        assert found["step_s"] == strategy.predict(changed, problem).metrics.iteration_s
        assert graph.ops[op].name in found["change"] and changed.explanation[-1].startswith("Moved by hand: ")
        # The way back is open, and leads to where it began.
        again = bench.answer(PlanQuestion(state=state(bench), plan=found["json"], move=[op, _stage(plan, op)]))
        assert from_json(Plan, again["json"]).stages == plan.stages and again["step_s"] == start["step_s"]


def test_a_border_that_is_dragged_takes_operators_along(bench: Bench) -> None:
    """As many as were asked for, or as may go and leave one; and the plan is one that the strategy has."""
    start, asked, gone = answer(bench), state(bench), []
    strategy, problem = bench._posed(asked)
    halves = replace(strategy, planner=Even()).plan(problem)
    for plan in (from_json(Plan, start["json"]), halves):
        ways = sorted({(s, t) for s, own in enumerate(moves(plan, problem.graph)) for _, t in own})
        for source, to in ways:
            for count in (1, 3, 99):
                found = bench.answer(PlanQuestion(state=asked, plan=to_json(plan), shift=[source, to, count]))
                changed = from_json(Plan, found["json"])
                went = set(plan.stages[source].ops) - set(changed.stages[source].ops)
                assert 1 <= len(went) <= min(count, len(plan.stages[source].ops) - 1)
                assert set(changed.stages[to].ops) == {*plan.stages[to].ops, *went}
                strategy.check(changed, problem)
                assert found["step_s"] == strategy.predict(changed, problem).metrics.iteration_s
                gone.append(len(went))
                name = problem.graph.ops[min(went)].name if len(went) == 1 else f"{len(went)} operators"
                assert found["change"] == f"{name} in stage {to} in place of stage {source}"
    assert max(gone) > 1 and start["operators"] == [len(stage.ops) for stage in from_json(Plan, start["json"]).stages]
    plan = from_json(Plan, start["json"])
    ways = {(source, to) for _, source, to, _ in start["moves"]}
    apart = next((s, t) for s in range(len(plan.stages)) for t in range(len(plan.stages)) if (s, t) not in ways)
    for shift, words in ((apart, "border that operators may cross"), ((-1, 0), "border"), ((0, 10**9), "border")):
        with pytest.raises(InvalidConfig, match=words):
            bench.answer(PlanQuestion(state=asked, plan=start["json"], shift=[*shift, 1]))
    with pytest.raises(InvalidConfig, match="must be 3 numbers"):
        bench.answer(PlanQuestion(state=asked, plan=start["json"], shift=[0, 1]))


LIVE = Path(moved.__file__).parent / "templates" / "live.js"


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine on this machine")
def test_the_farther_a_stage_is_dragged_the_more_goes_along() -> None:
    """Stage 1 of nine operators between stage 0 at its left, and stages 2 and 3 at its right, above and below."""
    moves = [[5, 1, 0, "a"], [9, 1, 2, "b"], [9, 1, 3, "b"]]
    middles = {0: (0, 0), 1: (100, 0), 2: (200, -50), 3: (200, 50)}
    ways = [(0, 0), (-50, 0), (-300, 0), (-4, 3), (50, -25), (100, 50), (10, 100), (0, -2)]
    source = LIVE.read_text()
    begin = source.index("  gpp.dragged = ")
    function = source[begin : source.index("\n  };\n", begin) + 5]
    script = f"""
      const gpp = {{}}; {function}
      const middles = new Map({json.dumps([[s, {"x": x, "y": y}] for s, (x, y) in middles.items()])});
      const entry = {{ operators: [3, 9, 4, 4], moves: {json.dumps(moves)} }};
      const found = {json.dumps(ways)}.map(([x, y]) => gpp.dragged(entry, middles, 1, {{ x, y }}));
      console.log(JSON.stringify([...found, gpp.dragged(entry, middles, 2, {{ x: -100, y: 50 }})]));
    """
    out = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == [None, [1, 0, 4], [1, 0, 8], None, [1, 2, 4], [1, 3, 8], [1, 3, 4], None, None]


def _stage(plan: Plan, op: int) -> int:
    return next(s for s, stage in enumerate(plan.stages) if op in stage.ops)


def test_what_trains_nothing_is_offered_its_own_schedule() -> None:
    assert list(schedules_offered([ForwardOnly()], trains=False)) == ["forward_only"]
    assert list(schedules_offered([GPipe()], trains=True))[:2] == ["1f1b", "gpipe"]


def test_what_no_page_asks_is_refused(bench: Bench) -> None:
    text = answer(bench)["json"]
    plan = from_json(Plan, text)
    offered = {tuple(move) for own in moves(plan, bench.problem.graph) for move in own}
    every = {(op, to) for op in range(bench.problem.graph.num_ops) for to in range(len(plan.stages))}
    for op, to in sorted(every - offered)[::3]:
        with pytest.raises(InvalidConfig, match="may go to"):
            bench.answer(PlanQuestion(state=state(bench), plan=text, move=[op, to]))
    for wrong in ([0], [*state(bench)[:-1], 99], [-1, *state(bench)[1:]]):
        with pytest.raises(InvalidConfig, match="position for each control"):
            bench.answer(PlanQuestion(state=wrong))
    with pytest.raises(InvalidConfig, match="must be one of torch, torchtitan, megatron, deepspeed"):
        bench.answer(PlanQuestion(state=state(bench), plan=text, export="../torch"))
    for body in (b"", b"[]", b'{"state": ["0"]}', b'{"state": [0], "other": 1}', b'{"plan": "x"}'):
        with pytest.raises(InvalidConfig, match="the request"):
            question(body)


def test_config_names_settings_and_no_other_code() -> None:
    link = {"_target_": "gpp.links.Link", "latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}
    assert restored([link])[0].bandwidth_bytes_per_s == 1.0
    for target in ("os.system", "builtins.eval", "tests.support.zoo.Towers"):
        with pytest.raises(InvalidConfig, match="code of another package"):
            restored({"a": {"_target_": target}})
    for target in ("gpp.files.write_text", "gpp.serialization.read_text", "gpp.app.command.main", "gpp.ui.command"):
        with pytest.raises(InvalidConfig, match="must name a class of settings"):
            restored({"_target_": target})
    # What another version has written says which setting, and what to do.
    with pytest.raises(
        InvalidConfig, match=r"config.yaml: cluster.link.speed=1: was written by another version.* Fix: delete speed in"
    ):
        restored({"cluster": {"link": link | {"speed": 1}}})
    with pytest.raises(
        InvalidConfig, match=r"config.yaml: link.latency_s=null: was written by .* Fix: set latency_s in that file, or"
    ):
        restored({"link": {"_target_": "gpp.links.Link", "bandwidth_bytes_per_s": 1.0}})
    with pytest.raises(InvalidConfig, match="must name a class of settings"):  # trusted, and still no class of settings
        restored({"_target_": "os.system"}, ("os",))


def test_factories_are_the_functions_of_conf() -> None:
    named = {
        word
        for path in CONF.rglob("*.yaml")
        for word in re.findall(r"^\s*_target_: ([\w.]+)", path.read_text(), re.M)
        if word.rpartition(".")[2].islower() and not word.startswith("hydra")
    }
    assert named == set(FACTORIES)
