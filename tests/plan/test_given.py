"""A plan in the user's own file is refused with the file, and with a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpp import Even, OneFOneB, OptimalOrder, Plan, Split1F1B, Strategy
from gpp.app.given import check_given
from gpp.errors import GppError, Infeasible, InvalidConfig
from gpp.mechanisms.helpers.stage import Helpers
from gpp.mechanisms.marks.stage import Marks
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.plan.build import make_plan
from gpp.schedules.base import AbstractSchedule
from tests.support.graphs import chain, problem, with_weights

PROBLEM = problem(with_weights(chain(4)), 2, 8)
PLAN = make_plan(PROBLEM, "test", [(3, 1), (12, 1)], 2)


def of_first(**fields: Any) -> Plan:
    return replace(PLAN, stages=(replace(PLAN.stages[0], **fields), PLAN.stages[1]))


@pytest.mark.parametrize(
    ("plan", "schedule", "message"),
    [
        (replace(PLAN, minibatch_size=4), OneFOneB(), r"minibatch_size=4, the run asks for 8. Fix: set minibatch_size=4"),
        (replace(PLAN, edges=((1, 0),)), OneFOneB(), r"edge 1->0 does not go forward.*Fix: correct the file"),
        (
            of_first(mechanisms=(TensorParallel(degree=2),)),
            OneFOneB(),
            r"stage 0: tensor_parallel=2 must divide its 1 devices. Fix: correct",
        ),
        (
            of_first(mechanisms=(Marks(recompute=(2,)),)),
            OneFOneB(),
            r"stage 0: recompute=\[2\] names operators that are not its own. Fix: correct",
        ),
        (
            of_first(mechanisms=(Helpers(weight_device=1),)),
            OneFOneB(),
            r"stage 0: weight_device=1 has half of a backward a period later",
        ),
        (of_first(k=2), Split1F1B(), r"stage 0: k=2 passes.*needs k=1. Fix: plan with strategy.planner.per_stage=false"),
        (PLAN, OptimalOrder(max_tasks=5), r"strategy.schedule.max_tasks=5: .*Fix: use strategy/schedule=zero_bubble_auto"),
    ],
)
def test_a_wrong_plan_names_its_file_and_a_fix(plan: Plan, schedule: AbstractSchedule, message: str) -> None:
    with pytest.raises(GppError, match=rf"^plan=mine\.json: .*{message}") as caught:
        check_given(Strategy(name="test", planner=Even(), schedule=schedule), "mine.json", plan, PROBLEM)
    assert str(caught.value).count("Fix:") == 1 and caught.value.exit_code == 2


def test_a_size_that_the_plan_has_not_is_refused() -> None:
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    with pytest.raises(
        InvalidConfig, match=r"microbatch_size=4: stage 0 of plan=mine\.json .* of 2 samples. Fix: set microbatch_size=2"
    ):
        check_given(strategy, "mine.json", PLAN, replace(PROBLEM, microbatch_size=4))
    check_given(strategy, "mine.json", PLAN, replace(PROBLEM, microbatch_size=2))


def test_a_plan_that_does_not_fit_is_infeasible() -> None:
    small = problem(with_weights(chain(4)), 2, 8, memory_bytes=1.0)
    with pytest.raises(Infeasible, match=r"^plan=mine\.json: stage 1 needs"):
        check_given(Strategy(name="test", planner=Even(), schedule=OneFOneB()), "mine.json", PLAN, small)
