"""Programs of plans with helpers, without processes: times, waits, stretches, the work that they do, and bills."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import SGD, LayerPipe, NoFlush, Plan, Stash, Strategy
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, MalformedProgram, UnsupportedPlan
from gpp.mechanisms.helpers.job import JOB
from gpp.mechanisms.helpers.kinds import HELPED_WEIGHTS
from gpp.mechanisms.helpers.operands import operands_of_stage
from gpp.mechanisms.helpers.worker import WORKER
from gpp.program.kinds import UPDATES
from gpp.program.program import Program, check_program, reduce_groups
from gpp.program.steady_state import of_length
from gpp.runtime.job_fit import check_work
from gpp.runtime.worker.hooks import OwnDevice
from gpp.simulate.simulator import simulate
from tests.mechanisms.helpers.test_prediction import layers, random_seconds
from tests.mechanisms.helpers.test_stage import PROBLEM, STREAM, delayed, helped
from tests.support.asynchronous import make_job
from tests.support.fake_transport import FakeNetwork, FakeTransport
from tests.support.graphs import cluster


def _random(rng: random.Random) -> tuple[Strategy, Problem, Plan]:
    """A plan of layers of random times, for one micro-batch an update or two."""
    intra, count = rng.choice(["neighbour", "anywhere"]), rng.choice([1, 2])
    planner = LayerPipe(intra=intra, divide=rng.random() < 0.5)  # pyright: ignore[reportArgumentType]
    strategy = Strategy(name="layerpipe", planner=planner, schedule=NoFlush(), weights=Stash(accumulation=count))
    graph = layers(random_seconds(rng))
    problem = Problem(graph=graph, cluster=cluster(rng.randint(2, 6)), cost=Constant(), minibatch_size=count)
    return strategy, problem, strategy.plan(problem)


def test_a_run_of_the_program_takes_the_longest_load() -> None:
    """The prediction knows no program, and the simulator no periods: where nobody waits for sums and messages, they agree."""
    rng, seen = random.Random(3), 0
    for _ in range(14):
        strategy, problem, plan = _random(rng)
        if not plan.periodic:
            continue
        seen += 1
        program = strategy.lower(plan, problem)
        assert Program.from_text(program.to_text()) == program
        check_work(program, plan, problem.graph, plan.minibatch_size * program.minibatches, Path("program.txt"))
        found, expected = (
            simulate(program, plan, strategy.posed(problem)).metrics,
            strategy.predict(plan, problem).metrics,
        )
        assert found.iteration_s == pytest.approx(expected.iteration_s, rel=1e-6), plan
        assert found.communication_bytes == expected.communication_bytes and found.staleness == expected.staleness
        assert found.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=1e-6)
    assert seen > 4


def test_stretches_of_any_length_do_the_same_for_each_minibatch() -> None:
    plan = helped(weight_device=4)
    program = STREAM.lower(plan, PROBLEM)
    groups = reduce_groups(plan, PROBLEM.graph)
    for count in (1, 2, 3, program.minibatches, program.minibatches + 5):
        actions = {device: tuple(of_length(program, plan, device, count)) for device in program.actions}
        stretch = Program(num_samples=count * plan.minibatch_size, actions=actions, minibatches=count)
        check_program(stretch, groups)
        check_work(stretch, plan, PROBLEM.graph, stretch.num_samples, Path("program.txt"))
        ends = Counter(a.stage for a in actions[4] if a.kind in UPDATES)
        assert ends == {1: count} and sum(a.kind == HELPED_WEIGHTS for a in actions[4]) == 2 * count


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("s1.RW0<s1.d1[0:2]@d4 ", "", "channel W s1.d1 > s1.d4: sender and receiver disagree"),
        ("s1.SW0>s1.d4[0:2]@d1 ", "", "35 sends against 36 receives"),
        ("s1.HW0@d4 ", "", "s1.RW0<s1.d1.* is posted for a pass that does not come"),
        ("s1.HW0@d4 ", "s1.HW0@d4 s1.HW0@d4 ", "blocked: .*s1.HW0@d4"),
    ],
)
def test_programs_that_cannot_run_are_refused(old: str, new: str, message: str) -> None:
    plan = helped(weight_device=4)
    text = STREAM.lower(plan, PROBLEM).to_text()
    assert text.count(old) == 1
    with pytest.raises(MalformedProgram, match=message):
        check_program(Program.from_text(text.replace(old, new)), reduce_groups(plan, PROBLEM.graph))


def test_a_helper_that_is_sent_nothing_is_refused() -> None:
    plan = helped(weight_device=4)
    program = STREAM.lower(plan, PROBLEM)
    text, samples = program.to_text(), plan.minibatch_size * program.minibatches
    for old in ("s1.SW0>s1.d4[0:2]@d1 ", "s1.RW0<s1.d1[0:2]@d4 "):
        text = text.replace(old, "")
    with pytest.raises(MalformedProgram, match=r"s1\.SW0.* stands there 0 times, and by plan.json and graph.json it must be 1"):
        check_work(Program.from_text(text), plan, PROBLEM.graph, samples, Path("program.txt"))


def test_two_stages_of_a_device_update_each_in_its_own_period() -> None:
    plan = helped(weight_device=4)
    stages = tuple(replace(stage, devices=(1,)) if n == 2 else stage for n, stage in enumerate(plan.stages))
    plan = delayed(replace(plan, stages=stages))
    program = STREAM.lower(plan, PROBLEM)
    order = [a.text(1) for a in program.actions[1] if a.kind in UPDATES]
    # Stage 1's W is a period later than stage 2's: between two of its updates there is one of the other.
    assert order[:4] == ["s2.U0@d1", "s1.U0@d1", "s2.U1@d1", "s1.U1@d1"]


HELPED: dict[str, Any] = {"devices": (0, 1, 2), "helpers": (1, None, None)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"autocast": "bfloat16"}, r"engine\.autocast=bfloat16: devices \[1\] help stage 0: .* set engine.autocast=null"),
        ({"enforce_memory": True}, r"engine\.enforce_memory=true: devices \[1\] help stage 0"),
        ({"checkpoint_every": 2}, r"checkpoint\.drain=false: devices \[1\] help stage 0: .* set checkpoint.drain=true"),
    ],
)
def test_settings_that_helpers_cannot_be_combined_with(settings: dict[str, Any], message: str) -> None:
    job, _ = make_job("Chain", Stash(), SGD(lr=0.1, momentum=0.9), **HELPED, **settings)
    with pytest.raises(InvalidConfig, match=message):
        JOB.refuse(job)
    JOB.refuse(make_job("Chain", Stash(), SGD(lr=0.1, momentum=0.9), **HELPED, checkpoint_every=2, checkpoint_drain=True)[0])


def test_gradients_that_are_no_product_of_one_layer_are_not_divided() -> None:
    shares = {1: ((0, 0.5),)}
    make_job("Chain", Stash(), SGD(lr=0.1, momentum=0.9), **HELPED, shares=shares)
    with pytest.raises(
        UnsupportedPlan, match=r"stage 1: input_share=\[\[0, 0.01\]\] gives a device less than one of the 6 columns"
    ):
        make_job("Chain", Stash(), SGD(lr=0.1, momentum=0.9), **HELPED, shares={1: ((0, 0.01),)})
    with pytest.raises(
        UnsupportedPlan,
        match=r"divides gradients of inputs .* it has 2 inputs with gradients\. Fix: plan with strategy.planner.divide=false",
    ):
        make_job("Fork", Stash(), SGD(lr=0.1, momentum=0.9), devices=(0, 1, 2, 3), helpers=(None,) * 4, shares={3: ((0, 0.5),)})


def test_a_helper_holds_no_weights_and_makes_all_that_it_is_there_for() -> None:
    """Else equality (`tests/mechanisms/weight_versions/test_async_equality.py`) would say little: nothing of a linear layer is left
    to the stage's own device."""
    devices, helpers = (0, 1, 1, 2), (1, 3, 0, None)
    job, _ = make_job("Chain4", Stash(), SGD(lr=0.1, momentum=0.9), sizes=2, devices=devices, helpers=helpers)
    own = OwnDevice(
        job=job,
        device_id=3,
        device=torch.device("cpu"),
        modules={},
        params={},
        transport=FakeTransport(FakeNetwork((), 4), 3),
        handover={},
        card=None,
    )
    (helper,) = WORKER.build(own).helpers.values()
    names = {name for op in job.plan.stages[1].ops for name in job.graph.trained_by[op]}
    assert set(helper.params) == names == {name for each in operands_of_stage(job, 1) for name in each.params}
    assert all(param.untyped_storage().nbytes() == 8 for param in helper.params.values())
