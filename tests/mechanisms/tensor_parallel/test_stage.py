"""Stages whose replicas are several devices: their files, and what the report says."""

import json

import pytest

from gpp.errors import InvalidPlan
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.plan import Plan
from gpp.report.draw.stage_graph import operator_words
from gpp.serialization import from_json, to_json
from tests.support.problems import split_plan, split_problem

PLAN = split_plan(split_problem(6), replicas=2)


def test_files_of_earlier_versions_have_the_degree_in_the_stage() -> None:
    assert from_json(Plan, to_json(PLAN)) == PLAN
    content = json.loads(to_json(PLAN))
    for stage in content["stages"]:
        stage["tensor_parallel"] = stage.pop("mechanisms", {}).get("tensor_parallel", {}).get("degree", 1)
    assert [stage["tensor_parallel"] for stage in content["stages"]] == [1, 2, 1]
    assert from_json(Plan, json.dumps(content)) == PLAN


def test_neighbours_share_a_replica() -> None:
    whole, split, _ = PLAN.stages
    assert (whole.devices_per_replica, whole.replicas, whole.unshared) == (1, ((0,),), "")
    assert split.replicas == ((1, 2), (3, 4)) and split.replica_of(4) == (3, 4)
    assert split.unshared == TensorParallel.without


def test_the_report_says_marks_before_the_degree() -> None:
    assert [operator_words(stage) for stage in PLAN.stages] == ["", "split in 2", ""]
    assert operator_words(marked(PLAN.stages[1], recompute=(1,))) == "1 recomputed, split in 2"


def test_no_requests_are_served() -> None:
    PLAN.stages[1].mechanisms[0].check_pipeline(1, trains=True)
    with pytest.raises(InvalidPlan, match=r"stage 1 splits its operators.*tensor_parallel=false"):
        PLAN.stages[1].mechanisms[0].check_pipeline(1, trains=False)
