"""The yardstick of refactorings: what is recorded twice is equal, and what differs is found."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from tests.same import cases, compare
from tests.same.cases import Meant
from tests.same.record import server, taken

SIMULATED = "engine=simulate cost=analytical logger=none"
SAMPLE = (
    f"model=random model.num_ops=12 cluster=summit_1x4 strategy=graphpipe {SIMULATED}",
    f"model=random model.num_ops=9 cluster=summit_1x4 cluster.memory_bytes=1e3 strategy=even {SIMULATED}",
)


Recorded = tuple[Path, dict[str, dict]]
"""A folder, and the records of the sample."""


def record(folder: Path, seed: str) -> Recorded:
    """The sample, recorded by a process with a hash seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", seed)
        served = server(cases.TESTS.parent, torch=False)
    try:
        return folder, {case: taken(served, case, folder / "programs") for case in SAMPLE}
    finally:
        served.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("record"), "0")


@pytest.mark.long
def test_two_records_of_one_checkout_are_equal(recorded: Recorded, tmp_path: Path) -> None:
    (first, before), (second, after) = recorded, record(tmp_path, "4242")
    assert [record["status"] for record in before.values()] == ["ok", "infeasible"]
    assert [record["exit"] for record in before.values()] == [0, 3]
    lines, unmeant = compare.report(before, after, (first, second))
    assert unmeant == 0 and lines == ["2 cases: 2 the same or as meant, 0 differ in 0 fields"]


def test_a_record_holds_plan_program_and_prediction(recorded) -> None:
    folder, before = recorded
    record = before[SAMPLE[0]]
    assert (folder / "programs" / f"{record['program']}.txt").stat().st_size == record["program_length"] > 0
    assert sum(len(stage["ops"]) for stage in record["plan"]["stages"].values()) == record["result"]["num_ops"] == 12
    assert record["predicted"]["iteration_s"] > 0 and record["cpu_s"] > 0 and record["search_s"] > 0


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("predicted", "iteration_s"), 1 + 3e-12, "predicted.iteration_s"),
        (("predicted", "peak_memory_bytes", "0"), 2, "predicted.peak_memory_bytes.0"),
        (("plan", "stages", "0", "ops"), [0], "plan.stages.0.ops"),
        (("plan", "edges"), [[0, 9]], "plan.edges"),
        (("program",), "another", "program"),
        (("exit",), 1, "exit"),
    ],
)
def test_each_difference_is_found(recorded, monkeypatch, path, value, field) -> None:
    before = recorded[1]
    after = deepcopy(before)
    place = after[SAMPLE[0]]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value * place[path[-1]] if isinstance(value, float) else value
    lines, unmeant = compare.report(before, after)
    assert unmeant == 1 and lines[0] == SAMPLE[0] and lines[1].split()[0] == field
    monkeypatch.setattr(compare, "MEANT", (Meant(case="num_ops=12", field=f"^{field}$", reason="a test"),))
    assert compare.report(before, after)[1] == 0
    assert compare.report(before, {})[1] == len(SAMPLE)


def test_rounding_of_a_prediction_is_no_difference_but_of_a_loss_it_is(recorded) -> None:
    before = deepcopy(recorded[1])
    before[SAMPLE[0]]["loss"] = [0.5, 0.25]
    after = deepcopy(before)
    after[SAMPLE[0]]["predicted"]["iteration_s"] *= 1 + 1e-15
    assert compare.report(before, after)[1] == 0
    after[SAMPLE[0]]["loss"] = [0.5, 0.25 + 2**-54]
    lines, unmeant = compare.report(before, after)
    assert unmeant == 1 and "loss" in lines[1] and "5.6e-17" in lines[-1]


def test_cases_have_different_names_and_say_all_that_they_depend_on() -> None:
    every = [*cases.matrix(), *cases.runs()]
    assert len(every) == len(set(every)) and len(cases.matrix()) >= 150 and len(cases.runs()) >= 20
    assert all("cost=analytical" in case and "logger=none" in case for case in every)
    assert all("cluster.memory_bytes" in case for case in every if "cluster=local " in case)
