"""The bits of a stage's messages: files of earlier versions, and what is left of them in a part of the stage."""

import json
from typing import Any

import pytest

from gpp import Analytical, Plan
from gpp.cost.problem import Problem
from gpp.errors import InvalidFile
from gpp.graph.forward_only import forward_only
from gpp.mechanisms.quantised_edges.settings import PLAIN, QuantisedEdges
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.plan.build import make_plan
from gpp.serialization import from_json, to_json
from tests.support.graphs import diamond
from tests.support.problems import cluster

PROBLEM = Problem(graph=forward_only(diamond()), cluster=cluster(4), cost=Analytical(), minibatch_size=8)
PLANNED = make_plan(PROBLEM, "test", [(1 << op, 1) for op in range(PROBLEM.graph.num_ops)], 2)


def earlier(plan: Plan, **more: Any) -> dict[str, Any]:
    """The content of a plan.json in which the plan itself says the bits of its edges, one after the other."""
    content = json.loads(to_json(plan))
    values = [(stage.pop("mechanisms", None) or {}).get("quantised_edges") for stage in content["stages"]]
    content["edge_bits"] = [dict(values[s]["bits"])[t] for s, t in content["edges"]]
    first = next(value for value in values if value)
    return content | {f"edge_{name}": first[name] for name in ("clip", "auto") if name in first} | more


@pytest.mark.parametrize("asked", [{"bits": 5}, {"bits": 3, "clip": True}, {"bits": "auto"}, {"bits": "auto", "clip": True}])
def test_files_of_earlier_versions_have_the_bits_in_the_plan(asked: dict[str, Any]) -> None:
    plan = QuantisedEdges(**asked).chosen(PLANNED, PROBLEM)
    assert [stage[EdgeBits] is not None for stage in plan.stages] == [bool(readers) for readers in plan.successors]
    assert from_json(Plan, to_json(plan)) == plan
    assert from_json(Plan, json.dumps(earlier(plan))) == plan


def test_earlier_files_that_do_not_fit_are_refused() -> None:
    plan = QuantisedEdges(bits=4).chosen(PLANNED, PROBLEM)
    for wrong in ([4], 4, None, [4.5] * len(plan.edges)):
        with pytest.raises(InvalidFile, match="bits"):
            from_json(Plan, json.dumps(earlier(plan, edge_bits=wrong)))


def test_files_of_plans_whose_values_travel_as_they_are_have_none() -> None:
    assert "mechanisms" not in to_json(PLANNED)
    assert PLAIN.chosen(QuantisedEdges(bits=4).chosen(PLANNED, PROBLEM), PROBLEM) == PLANNED


def test_a_part_of_a_stage_has_other_edges() -> None:
    stage = QuantisedEdges(bits=4).chosen(PLANNED, PROBLEM).stages[0]
    assert stage.within(stage.ops).mechanisms == ()
