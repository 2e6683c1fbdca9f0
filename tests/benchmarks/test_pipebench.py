"""PipeBench: its judge, its bounds, its command, on a few problems; `tests.checks.pipebench` is the long comparison."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipebench.__main__ import HERE, main, problems
from benchmarks.pipebench.bounds import bound_of
from benchmarks.pipebench.verify import Invalid, judge
from tests.checks.pipebench import compared
from tests.oracle.exhaustive import convex_partitions
from tests.support.graphs import chain


def known() -> dict[str, Any]:
    return json.loads((HERE / "known.json").read_text())


def by_hand() -> dict[str, Any]:
    """Two operators of one and two seconds, which hand on two bytes."""
    op = {"forward": 1.0, "backward": 2.0, "saved": 1, "parameters": 8}
    return {
        "name": "two",
        "minibatch": 2,
        "devices": 4,
        "max_replicas": 2,
        "memory": 100,
        "weight_copies": 2,
        "bandwidth": 4.0,
        "latency": 0.25,
        "operators": [op, op],
        "tensors": [{"from": 0, "to": [1], "bytes": 2, "stored": True}],
    }


def plan(*stages: tuple[list[int], list[int]], size: int = 1) -> dict[str, Any]:
    return {"problem": "two", "microbatch": size, "stages": [{"operators": ops, "devices": on} for ops, on in stages]}


def test_the_step_is_what_is_reckoned_by_hand() -> None:
    # Two micro-batches on one device: F0 B0 F1 B1, three seconds each an operator.
    assert judge(by_hand(), plan(([0, 1], [3]))) == 12.0
    # s0: F0 0-1, F1 1-2; the message takes 0.5 and 0.25; s1: F0 1.75, B0 2.75, F1 4.75, B1 5.75 to 7.75; 0.75 later B1 of s0: 2.
    assert judge(by_hand(), plan(([0], [0]), ([1], [1]))) == 10.5
    # Both samples at once on two devices: 2 * 3 seconds, and 2 * (0.25 + 16 / 2 / 4) for the gradients of sixteen bytes.
    assert judge(by_hand(), plan(([0, 1], [1, 2]), size=2)) == 6.0 + 4.5


def test_each_rule_is_named() -> None:
    problem = by_hand()
    wrong = {
        1: plan(([0], []), ([1], [1])),
        2: plan(([0, 1], [0]), size=3),
        3: plan(([0], [0])),
        4: plan(([0], [0]), ([1], [0])),
        5: plan(([1], [0]), ([0], [1])),
    }
    for rule, given in wrong.items():
        with pytest.raises(Invalid, match=f"^{rule}: "):
            judge(problem, given)
    # Two micro-batches of one byte and two that go out, a message each way, and both copies of eight bytes.
    needs = 16 + 2 * 1 + 2
    with pytest.raises(Invalid, match=r"^6: stage 0"):
        judge({**problem, "memory": needs - 1}, plan(([0], [0]), ([1], [1])))
    assert judge({**problem, "memory": 1e3}, plan(([0], [0]), ([1], [1]))) > 0


def test_the_judge_and_the_platform_agree_on_mutated_plans() -> None:
    every, decided = problems(), Counter[str]()
    for number in range(80):
        why, differs = compared(number, every)
        assert differs is None
        decided[why] += 1
    assert decided["valid"] >= 5 and len(decided) == 7


def test_the_judge_needs_nothing_but_python() -> None:
    for name in ("verify.py", "score.py"):
        for node in ast.walk(ast.parse((HERE / name).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(found.partition(".")[0] in {*sys.stdlib_module_names, "verify"} for found in names)


def test_what_is_known_is_valid_and_over_its_bound() -> None:
    found, every = known(), {problem["name"]: problem for problem in problems()}
    assert found.keys() == every.keys() and len(every) == 60
    for name, one in found.items():
        if one["plan"] is not None:
            assert judge(every[name], one["plan"]) == one["best_s"] >= one["bound_s"] * (1 - 1e-9)


def test_no_plan_beats_a_bound() -> None:
    """Every plan of small problems, by brute force."""
    for number, (latency, memory) in enumerate([(0.0, 1e9), (0.5, 40.0)]):
        ops = [{"forward": float(1 + i % 2), "backward": 2.0 + number, "saved": 1, "parameters": 2 * i} for i in range(4)]
        tensors = [{"from": i, "to": [i + 1], "bytes": 1, "stored": True} for i in range(3)]
        problem = {**by_hand(), "operators": ops, "tensors": tensors, "devices": 3, "latency": latency, "memory": memory}
        best = min(_steps(problem))
        proofs = bound_of(problem, 5.0)
        assert 0 < min(proof.bound_s for proof in proofs) <= best * (1 + 1e-9)
        assert any(proof.how == "solved" for proof in proofs)


def _steps(problem: dict[str, Any]) -> list[float]:
    out = []
    for masks in convex_partitions(chain(4)):
        parts = sorted([op for op in range(4) if mask >> op & 1] for mask in masks)
        for size, widths in itertools.product((1, 2), itertools.product((1, 2), repeat=len(parts))):
            devices, at = [], 0
            for width in widths:
                devices.append(list(range(at, at + width)))
                at += width
            try:
                out.append(judge(problem, plan(*zip(parts, devices, strict=True), size=size)))
            except Invalid:
                continue
    return out


@pytest.mark.long
def test_the_command_plans_bounds_and_draws_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "random_0[1]", "--out", str(tmp_path), "--seconds", "1"]) == 0
    made = json.loads((tmp_path / "known.json").read_text())["random_01"]
    assert made["best_s"] <= known()["random_01"]["best_s"] * (1 + 1e-9) and "| graphpipe | 1 | 0 | 0 |" in capsys.readouterr().out
    plans = tmp_path / "plans"
    plans.mkdir()
    (plans / "random_01.json").write_text(json.dumps(made["plan"]))
    scored = subprocess.run([sys.executable, HERE / "score.py", plans], capture_output=True, text=True)
    assert scored.returncode == 0 and "0 invalid, median 1.0000" in scored.stdout
    made["plan"]["microbatch"] = 0
    (plans / "random_01.json").write_text(json.dumps(made["plan"]))
    assert subprocess.run([sys.executable, HERE / "score.py", plans], capture_output=True).returncode == 1


def test_the_plans_of_a_planner_of_ones_own_are_written_for_the_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--planner", "tests.extending.split_slowest.SplitSlowest", "--plans", str(tmp_path), "--only"]
    assert main([*words, "random_0[014]"]) == 0
    assert "CPU s" in capsys.readouterr().out
    scored = subprocess.run([sys.executable, HERE / "score.py", tmp_path], capture_output=True, text=True)
    assert "0 invalid" in scored.stdout and "better" not in scored.stdout
    with pytest.raises(SystemExit):
        main(["--planner", "tests.extending.split_slowest.SplitSlowest"])
