"""Stages with helpers: files, delays, and what is refused."""

import json
from dataclasses import replace

import pytest

from baselines.reference.reference import Reference
from gpp import Distributed, DoubleBuffer, Emulate, Even, LayerPipe, Naive, NoFlush, OneFOneB, Plan, Recompute, Stash, Strategy
from gpp.app.given import check_engine
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.cost.stage import beside_bytes
from gpp.errors import Infeasible, InvalidConfig, InvalidFile, InvalidPlan
from gpp.mechanisms.helpers.stage import Helpers, columns, delays
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.weight_versions.corrections.gap_aware import GapAware
from gpp.plan.build import make_plan
from gpp.program.steady_state import check_stream
from gpp.serialization import from_json, to_json
from gpp.weights.base import AbstractWeights
from tests.mechanisms.helpers.test_prediction import layers
from tests.support.graphs import cluster

GRAPH = layers([(1.0, 0.0, 1.0)] + 3 * [(1.0, 1.0, 1.0)])
PROBLEM = Problem(graph=GRAPH, cluster=cluster(6), cost=Constant(), minibatch_size=4)
STREAM = Strategy(name="stream", planner=LayerPipe(), schedule=NoFlush(), weights=Stash(accumulation=1))
PLAIN = make_plan(PROBLEM, "hand", [(1 << op, 1) for op in range(4)], 2)


def helped(**of_stage: object) -> Plan:
    """Four stages of one layer on devices 0 to 3, the second with helpers."""
    value = Helpers(**{name: of_stage.pop(name) for name in Helpers.earlier if name in of_stage})  # pyright: ignore[reportArgumentType]
    stages = (replace(s, **of_stage).having(value) if n == 1 else s for n, s in enumerate(PLAIN.stages))
    return delayed(replace(PLAIN, stages=tuple(stages)))


def delayed(plan: Plan) -> Plan:
    """The plan with as much in flight as its delays ask for."""
    late = late_by(plan)
    return replace(plan, stages=tuple(replace(s, in_flight=(d + 1) * 2) for s, d in zip(plan.stages, late, strict=True)))


def late_by(plan: Plan) -> tuple[int, ...]:
    return delays(plan.stages, plan.edges)


def test_files_of_plans_without_helpers_are_as_they_were() -> None:
    assert "weight_device" not in to_json(PLAIN) and "input_share" not in to_json(PLAIN)
    for plan in (PLAIN, helped(weight_device=4), helped(input_share=((0, 0.25), (4, 0.5)))):
        assert from_json(Plan, to_json(plan)) == plan


def test_files_of_earlier_versions_have_the_fields_in_the_stage() -> None:
    for plan in (
        helped(weight_device=0),
        helped(input_share=((0, 0.25), (4, 0.5))),
        helped(weight_device=4, input_share=((0, 1.0),)),
    ):
        content = json.loads(to_json(plan))
        stage = content["stages"][1]
        stage |= {"weight_device": None, "input_share": [], **stage.pop("mechanisms")["helpers"]}
        assert from_json(Plan, json.dumps(content)) == plan
    for wrong in (3, {"helpers": 3}):
        content["stages"][1]["mechanisms"] = wrong
        with pytest.raises(InvalidFile, match=r"stages\[1\]"):
            from_json(Plan, json.dumps(content))
    del content["stages"][1]["mechanisms"]
    content["stages"][1]["weight_device"] = "4"
    with pytest.raises(InvalidFile, match=r"stages\[1\]\.mechanisms.*'helpers'.*weight_device"):
        from_json(Plan, json.dumps(content))


def test_side_by_side_a_stage_is_late_by_twice_the_stages_behind_it() -> None:
    assert late_by(helped(weight_device=4)) == (6, 5, 2, 0)
    # By 1F1B, where devices alternate between both passes, it is half of that.
    assert [
        stage.ahead - 1
        for stage in make_plan(
            replace(PROBLEM, regime=STREAM.posed(PROBLEM).regime), "hand", [(1 << op, 1) for op in range(4)], 2
        ).stages
    ] == [3, 2, 1, 0]
    # The reader of the gradients makes a part of them: no longer a way. Another device does: one period more for all before.
    assert late_by(helped(input_share=((0, 0.5),))) == (6, 4, 2, 0)
    assert late_by(helped(input_share=((4, 0.5),))) == (7, 4, 2, 0)
    # Two stages on one device are no way apart.
    together = helped(weight_device=4)
    together = replace(together, stages=(replace(together.stages[0], devices=(1,)), *together.stages[1:]))
    assert late_by(together) == (4, 5, 2, 0)


def test_versions_follow_the_delay() -> None:
    plan = helped(weight_device=4)
    STREAM.check(plan, PROBLEM)
    metrics = STREAM.predict(plan, PROBLEM).metrics
    # An update comes for every two micro-batches.
    assert metrics.staleness == {0: 3, 1: 3, 2: 1, 3: 0}
    assert metrics.weight_versions == {0: 4, 1: 4, 2: 2, 3: 1}
    two = replace(STREAM, weights=DoubleBuffer())
    with pytest.raises(InvalidConfig, match="needs at least 7 micro-batches"):
        two.check(plan, PROBLEM)


def test_helpers_hold_what_they_are_sent() -> None:
    # The sum of the gradients, and two micro-batches of two samples, each of which is made of two bytes.
    trained = PROBLEM.trainable_bytes((1,))
    assert list(beside_bytes(PROBLEM, helped(weight_device=4).stages[1])) == [(4, trained + 2 * 2 * 2.0)]
    # Half of the weights, which come with every micro-batch, the gradients of the outputs, and half of those of the inputs.
    found = dict(beside_bytes(PROBLEM, helped(input_share=((0, 0.5),)).stages[1]))
    assert found == {0: trained / 2 * 2 + 2 * 2 * 1.5}
    small = replace(PROBLEM, cluster=cluster(6, memory_bytes=90.0))
    heavy = replace(GRAPH, ops=tuple(replace(op, late_bytes=50.0) for op in GRAPH.ops))
    STREAM.check(helped(weight_device=4), small)
    with pytest.raises(Infeasible, match="device 4, which works for stages of others, needs"):
        plan = replace(helped(weight_device=4), graph_fingerprint=heavy.fingerprint)
        STREAM.check(plan, replace(small, graph=heavy))


@pytest.mark.parametrize(
    ("of_stage", "message"),
    [
        ({"weight_device": 1}, r"stage 1: weight_device=1 names a device of the stage itself, \[1\]. Fix: leave it out, or name"),
        ({"input_share": ((1, 0.5),)}, r"stage 1: input_share=\[\[1, 0.5\]\] names a device of the stage itself"),
        ({"weight_device": 9}, "stage 1: weight_device=9 must name devices out of 0..5. Fix: name one of these"),
        ({"input_share": ((4, 0.6), (5, 0.6))}, "add up to 1 at most, not 1.2. Fix: give each helper its part of 1"),
        ({"input_share": ((4, 0.0),)}, "has shares above 0"),
        ({"input_share": ((4, 0.1), (4, 0.1))}, "names a device twice"),
        (
            {"weight_device": 4, "devices": (1, 5)},
            r"stage 1: devices=\[1, 5\] has no place in a plan with helpers.* Fix: one device",
        ),
        ({"weight_device": 4, "mechanisms": (Marks(recompute=(1,)),)}, r"stage 1: recompute=\[1\] has no place.*Fix: leave it out"),
    ],
)
def test_helpers_that_cannot_help_are_refused(of_stage: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        helped(**of_stage).check_stages(GRAPH, 6)


def test_a_plan_that_states_another_delay_is_refused() -> None:
    plan = helped(weight_device=4)
    early = replace(plan, stages=(*plan.stages[:3], replace(plan.stages[3], in_flight=4)))
    with pytest.raises(InvalidPlan, match="stage 3: in_flight=4 must be 2: its gradients are late by 0 micro-batches"):
        STREAM.check(early, PROBLEM)


def test_a_pipeline_that_drains_has_no_helpers() -> None:
    flush = Strategy(name="even", planner=Even(), schedule=OneFOneB())
    with pytest.raises(InvalidPlan, match=r"stage 1: weight_device=4 .* drains .* Fix: strategy/schedule=no_flush"):
        flush.check(helped(weight_device=4), PROBLEM)


def test_engines_refuse_helpers_before_anything_starts() -> None:
    whole, weights = replace(STREAM, planner=LayerPipe(divide=False)), helped(weight_device=4)
    for engine in (Distributed(), Reference()):
        check_engine(engine, whole, None)
        check_engine(engine, STREAM, weights)
    for refuses in (lambda: check_engine(Emulate(), whole, None), lambda: check_engine(Emulate(), STREAM, weights)):
        with pytest.raises(InvalidConfig, match=r"engine=emulate: does not have devices make .* Fix: use engine=distributed"):
            refuses()
    check_engine(Distributed(), STREAM, PLAIN)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (Naive(), "strategy.weights=naive: has backwards use the latest weights"),
        (Stash(correction=GapAware()), "strategy.weights.correction=gap_aware: damps gradients"),
    ],
)
def test_policies_that_need_more_than_a_helper_has_are_refused(weights: AbstractWeights, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        replace(STREAM, weights=weights).check(helped(weight_device=4), PROBLEM)


def test_an_unequal_plan_has_no_periods() -> None:
    plan = helped(weight_device=4)
    unequal = replace(plan, stages=(*plan.stages[:3], replace(plan.stages[3], microbatch_size=1, in_flight=1)))
    with pytest.raises(InvalidPlan, match="stage 3: microbatch_size=1 is not 2, as of stage 0"):
        STREAM.check(unequal, PROBLEM)


def test_a_helper_without_work_is_refused() -> None:
    (name,) = GRAPH.trained_by[1]
    frozen = replace(GRAPH, params=tuple(replace(p, trainable=p.name != name) for p in GRAPH.params))
    with pytest.raises(InvalidPlan, match="stage 1: weight_device=4 has nothing to make"):
        check_stream(replace(helped(weight_device=4), graph_fingerprint=frozen.fingerprint), frozen, STREAM.weights)


def test_memory_policies_are_refused_by_the_settings() -> None:
    with pytest.raises(InvalidConfig, match=r"strategy\.memory=recompute: .*=layerpipe, which keep all. Fix: .*=keep"):
        replace(STREAM, memory=Recompute())


def test_columns_follow_the_shares() -> None:
    stage = helped(input_share=((0, 0.25), (4, 0.5))).stages[1]
    assert columns(stage, 8) == ((1, 0, 2), (0, 2, 4), (4, 4, 8))
    assert columns(stage, 3) == ((1, 0, 1), (0, 1, 2), (4, 2, 3))
    assert columns(stage.having(Helpers(input_share=((4, 1.0),))), 5) == ((1, 0, 0), (4, 0, 5))
