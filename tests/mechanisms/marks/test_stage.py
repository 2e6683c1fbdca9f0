"""Marks of a stage: their files, what is refused, and what is left of them in a part of the stage."""

import json
from dataclasses import replace

import pytest

from gpp import Analytical, Plan
from gpp.cost.problem import Problem
from gpp.errors import InvalidPlan
from gpp.mechanisms.marks.stage import Marks, marked, marks_of
from gpp.plan.build import make_plan
from gpp.serialization import from_json, to_json
from tests.support.graphs import chain
from tests.support.problems import cluster

PROBLEM = Problem(graph=chain(4, saved=10.0), cluster=cluster(2), cost=Analytical(), minibatch_size=8)
PLAIN = make_plan(PROBLEM, "test", [(0b0011, 1), (0b1100, 1)], 2, chain=True)


def with_marks(**fields: tuple[int, ...]) -> Plan:
    return replace(PLAIN, stages=(marked(PLAIN.stages[0], **fields), PLAIN.stages[1]))


EVERY = ({"recompute": (0, 1), "boundaries": (0,)}, {"offload": (1,)}, {"recompute": (0,), "offload": (1,)})


@pytest.mark.parametrize("fields", EVERY)
def test_files_of_earlier_versions_have_the_fields_in_the_stage(fields: dict[str, tuple[int, ...]]) -> None:
    plan = with_marks(**fields)
    assert from_json(Plan, to_json(plan)) == plan
    content = json.loads(to_json(plan))
    for stage in content["stages"]:
        nested = stage.pop("mechanisms", {}).get("marks", {})
        stage |= {"recompute": [], "boundaries": [], "offload": [], **nested}
    assert from_json(Plan, json.dumps(content)) == plan


def test_files_of_stages_that_keep_everything_have_none() -> None:
    assert "mechanisms" not in to_json(PLAIN)
    assert with_marks(recompute=()) == PLAIN


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recompute": (1, 0)}, r"stage 0: operators must ascend, got recompute=\[1, 0\]"),
        ({"offload": (0, 0)}, r"stage 0: operators must ascend, got offload=\[0, 0\]"),
        ({"recompute": (2,)}, r"recompute=\[2\] names operators that are not its own"),
        ({"offload": (3,)}, r"its own operators on the host only, not \[3\]"),
        ({"recompute": (0,), "boundaries": (1,)}, r"operators \[1\] are in boundaries, .* not in recompute"),
        ({"recompute": (0,), "offload": (0,)}, r"operators \[0\] are in recompute and in offload"),
    ],
)
def test_marks_that_do_not_fit_their_stage_are_refused(fields: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        with_marks(**fields).check_stages(PROBLEM.graph, 2)


def test_a_part_of_a_stage_has_the_marks_of_its_operators() -> None:
    stage = with_marks(recompute=(0,), offload=(1,)).stages[0]
    assert marks_of(stage.within((0, 5))) == Marks(recompute=(0,))
    assert stage.within((5,)).mechanisms == ()
    assert stage.keeping == PLAIN.stages[0]
