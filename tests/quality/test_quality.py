"""The ledger and the yardsticks, on problems that take a moment; `python -m tests.quality` has the others."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest

from gpp.errors import Infeasible
from gpp.plan.build import make_plan
from tests.quality import yardstick
from tests.quality.driver import experiment
from tests.quality.ledger import Row, by_turns, load, record
from tests.quality.oracle import _deals, _partitions, _Space, answer, problem_of
from tests.quality.problems import ON_DEMAND, PLANNERS, Question, questions
from tests.quality.random_search import RandomSearch
from tests.quality.summary import compared, paired, summed
from tests.support.conf import CONF, option, options
from tests.support.graphs import within
from tests.support.long import thinned

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    Question(
        "fits", "experiment=paper engine=simulate model=random model.num_ops=4 graph.max_ops=4 cluster=summit_1x4 minibatch_size=4"
    ),
    Question(
        "fits nowhere",
        "model=random model.num_ops=4 cluster=flat cluster.memory_bytes=1e3 engine=simulate cost=analytical mode=plan",
    ),
]


def test_problems_are_those_that_the_issue_asks_for() -> None:
    every = questions()
    random_ones = [question for question in every if "model=random" in question.words]
    assert len(every) == len({question.words for question in every}) == len({question.name for question in every}) == 150
    assert len(random_ones) == 110
    for question in random_ones:
        num_ops, devices = re.search(r" (\d+)x(\d+) ", question.name).groups()  # type: ignore[union-attr]
        assert 6 <= int(num_ops) <= 60 and 2 <= int(devices) <= 32, question
        assert f"model.num_ops={num_ops} " in question.words
    for words in ("cluster.num_nodes=3", "cluster.speeds=", "cluster=mixed_2x4", "cluster.memory_bytes="):
        assert any(words in question.words for question in random_ones), words
    assert not any("cluster=local " in q.words and "cluster.memory_bytes=" not in q.words for q in every), (
        "as much as this machine has"
    )


def test_every_planner_that_trains_is_asked() -> None:
    shipped = {path.stem for path in (CONF / "strategy" / "planner").glob("*.yaml")} - {"edgepipe"}  # which plans for requests
    words = [re.findall(r"strategy[=/](?:planner=)?(\w+)", each)[-1] for each in {**PLANNERS, **ON_DEMAND}.values()]
    found = options("strategy", sorted({word for word in words if word != "same_microbatch"}))
    assert {strategy.planner.name for strategy in found.values()} | {"same_microbatch"} == shipped


@pytest.mark.long
def test_a_record_is_made_once_and_two_checkouts_answer_by_turns(tmp_path: Path) -> None:
    file, said = tmp_path / "rows.jsonl", list[str]()
    rows = record(ROOT, file, SMALL, ["sequential"], say=said.append)
    assert rows == load(file) == record(ROOT, file, SMALL, ["sequential"], say=said.append)
    assert len(said) == 2, "what the file has was asked again"
    assert [row["status"] for row in rows] == ["ok", "infeasible"]
    assert rows[0]["step_s"] >= rows[0]["bound_s"] > 0 and rows[0]["cpu_s"] > 0
    assert rows[0]["simulated"] == 0, "compiled code times what is tried"
    with pytest.raises(ValueError, match="give another file"):
        file.write_text(json.dumps({**rows[0], "commit": "another"}) + "\n")
        record(ROOT, file, SMALL, ["sequential"], say=said.append)
    assert "sequential              2     1          1" in summed(rows)
    pairs = list(by_turns(ROOT, ROOT, SMALL[:1], ["sequential"], say=said.append))
    assert [before["step_s"] for before, _ in pairs] == [after["step_s"] for _, after in pairs]
    assert pairs[0][0]["step_s"] == rows[0]["step_s"]
    assert not compared(pairs).worse


def _row(problem: str, step_s: float | None, cpu_s: float = 1.0, planner: str = "even") -> Row:
    row = {"problem": problem, "planner": planner, "status": "ok" if step_s else "infeasible", "cpu_s": cpu_s}
    return row | ({"step_s": step_s, "bound_s": 1.0} if step_s else {})


def test_the_arithmetic_of_a_comparison() -> None:
    before = [
        _row("a", 1.0),
        _row("b", 4.0, 2.0),
        _row("c", 1.0),
        _row("d", None),
        _row("e", 2.0),
        _row("f", None),
        _row("gone", 1.0),
    ]
    after = [
        _row("a", 2.0),
        _row("b", 2.0, 1.0),
        _row("c", 1.004),
        _row("d", 3.0),
        _row("e", None),
        _row("f", None),
        _row("new", 1.0),
    ]
    pairs = paired(before, after)
    text, worse = compared(pairs)
    assert [(change.problem, change.ratio) for change in worse] == [("a", 2.0), ("e", math.inf)]
    mean, middle = (2.0 * 0.5 * 1.004) ** (1 / 3), (1.0 * 0.5 * 1.0) ** (1 / 3)
    row = next(line for line in text.splitlines() if line.startswith("even")).split()
    bound = 4.0 ** (1 / 3), (2.0 * 2.0 * 1.004) ** (1 / 3)
    figures = [f"{figure:.4f}" for figure in (mean, *bound)]
    assert row == ["even", "6", *figures, "2", "2", "1.000", f"{middle:.3f}"]
    named = re.findall(r"(\S+)  even +(\w)", text)
    assert named == [("now", "d"), ("0.5000", "b"), ("more", "e"), ("2.0000", "a"), ("1.0040", "c")]
    assert compared([(_row("a", 1.0), {**_row("a", 1.0), "status": "failed"})]).worse


def test_the_best_plans_known_are_plans_and_take_what_they_are_said_to_take() -> None:
    known, asked = json.loads(yardstick.KNOWN.read_text()), yardstick.questions()
    assert list(known) == [question.name for question in asked] and len(asked) == 36
    question = asked[4]
    one = experiment([*question.words.split(), *PLANNERS["graphpipe"].split()])
    captured = one.captured()
    problem = one.problem(captured, one.op_graph(captured))
    plan = yardstick.plan_of(known[question.name], problem)
    plan.validate(problem)
    assert one.strategy.predict(plan, problem).metrics.iteration_s == pytest.approx(known[question.name]["step_s"], rel=1e-9)
    assert yardstick.summary([1.0, 1.005, 1.04, 1.2]).startswith(
        "4 problems: 2 within 1%, 3 within 5%, 3 within 10%; median 1.0225"
    )


@pytest.mark.parametrize("number", thinned([1, 3]))
def test_a_search_at_random_finds_what_the_oracle_finds(number: int) -> None:
    problem, strategy = problem_of(number, 4, 3), option("strategy", "graphpipe")
    every = answer(problem, strategy)
    assert every.seconds <= every.planner_s < math.inf and every.num_predicted > 0
    found = RandomSearch(problem, strategy, random.Random(0)).run(cpu_s=math.inf, climbs=20)
    assert found.seconds >= every.seconds * (1 - 1e-9)
    assert found.seconds == pytest.approx(every.seconds, rel=0.02)


def test_the_oracle_tries_every_partition_and_says_when_nothing_fits() -> None:
    problem = problem_of(0, 4, 2)
    whole, alone = problem.graph.all_mask, tuple(1 << op for op in range(problem.graph.num_ops))
    found = {frozenset(masks) for masks in _partitions(problem)}
    assert {frozenset([whole]), frozenset(alone)} <= found
    with pytest.raises(Infeasible):
        answer(within(problem, 1.0), option("strategy", "graphpipe"))


def test_what_the_oracle_leaves_out_for_its_memory_does_not_fit() -> None:
    problem = problem_of(14, 5, 4)  # nothing fits
    left_out = 0
    for masks in _partitions(problem):
        space = _Space.of(problem, masks, 2)
        for row, deal in zip(space.bounds_s, _deals(len(masks), space.groups), strict=True):
            if row == math.inf:
                placement = [space.groups[g] for g in deal]
                parts = [(mask, len(devices)) for mask, devices in zip(masks, placement, strict=True)]
                with pytest.raises(Infeasible):
                    make_plan(problem, "oracle", parts, 2, ordered=True, placement=placement).validate(problem)
                left_out += 1
    assert left_out
