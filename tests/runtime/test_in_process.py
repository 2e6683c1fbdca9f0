"""Training on stages gives the single device's losses and weights, whatever the plan."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from baselines.reference.pipeline import Pipeline
from gpp.cost.regime import Regime
from gpp.data.digits import DigitsData
from gpp.data.synthetic import Synthetic
from gpp.optimizers import SGD, Adam, LearningRate, RMSprop
from gpp.plan.build import make_plan
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support import inprocess
from tests.support.inprocess import data_of
from tests.support.long import thinned
from tests.support.problems import random_partition

STEPS = 2
MODELS = [
    "digits",
    "mmt_small",
    "dlrm_small",
    "gpt_small",
]
MORE = [
    "bridge_tower_small",
    "candle_uno_small",
    "clip_small",
    "digits_deep",
    "digits_tasks",
    "evoformer_small",
    "flava_small",
    "gnmt_small",
    "imagebind_small",
    "inception_small",
    "llava_small",
    "residual_lstm_small",
    "resnet_small",
    "translator_small",
    "unet_small",
    "vgg_small",
]
"""Those whose operators and shapes others have, too."""
CASES = [
    *((name, 0) for name in MODELS),
    *(pytest.param(name, 0, marks=pytest.mark.long) for name in MORE),
    *(pytest.param(name, seed, marks=pytest.mark.long) for name in MODELS for seed in (1, 2)),
]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_random_plans_equal_one_device(name: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{name}{seed}")
    model, cap, weights = inprocess.captured_named(name)
    data = data_of(model)
    schedule = rng.choice([OneFOneB(), GPipe()])
    adaptive = [Adam(lr=1e-3), Adam(lr=1e-3, weight_decay=0.1, decoupled=True), RMSprop(lr=1e-3, momentum=0.5)]
    optimizer = rng.choice([SGD(lr=0.05, momentum=0.9), *adaptive])
    problem = inprocess.problem_of(cap, 8, 16, max_ops=rng.choice([8, 16, 24]), regime=Regime(holds=schedule.holds))
    parts = random_partition(problem.graph, rng.randint(2, 4), rng)
    sizes = [rng.choice([2, 4, 8]) for _ in parts]
    plan = make_plan(problem, "test", [(mask, rng.choice([1, 1, 2])) for mask in parts], sizes, chain=rng.random() < 0.3)
    job = inprocess.make_job(cap, problem, plan, schedule, model=model, data=data, optimizer=optimizer, steps=5, dtype="float64")
    losses, state, _ = inprocess.run(job, tmp_path, weights)
    expected, params = inprocess.reference(model, data, optimizer, weights, steps=5, minibatch_size=16, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-9)
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8, msg=lambda m, n=tensor_name: f"{n}: {m}")


@pytest.mark.parametrize("sizes", thinned([[2, 2, 4], [4, 4, 4]]))
def test_two_forwards_two_backwards_equal_one_device(sizes: list[int], tmp_path: Path) -> None:
    """k = 2 at the first two stages: they keep more samples and run backwards in pairs."""
    model, cap, weights = inprocess.captured_named("mmt_small")
    data, optimizer = data_of(model), SGD(lr=0.05, momentum=0.9)
    problem = inprocess.problem_of(cap, 4, 16)
    parts = random_partition(problem.graph, 3, random.Random(7))
    plan = make_plan(problem, "test", [(mask, 1 + (i == 1)) for i, mask in enumerate(parts)], sizes, k=[2, 2, 1], ordered=True)
    assert [stage.k for stage in plan.stages] == [2, 2, 1]
    job = inprocess.make_job(cap, problem, plan, OneFOneB(), model=model, data=data, optimizer=optimizer, steps=3, dtype="float64")
    losses, state, _ = inprocess.run(job, tmp_path, weights)
    expected, params = inprocess.reference(model, data, optimizer, weights, steps=3, minibatch_size=16, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-9)
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # whole stages without anything to train
        pytest.param("llava_small", ("model.frozen=towers",), marks=pytest.mark.long),
        pytest.param("clip_small", ("model.loss=gpp.models.networks.clip.contrastive_loss",), marks=pytest.mark.long),
        ("resnet_small", ("model.norm=batch", "model.image_size=64")),  # 4 pixels at the end: a variance that rounding cannot move
    ],
)
def test_whole_minibatches_equal_one_device_even_where_samples_are_coupled(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    model, cap, weights = inprocess.captured_named(name, *overrides)
    data, optimizer = Synthetic(num_samples=32, num_test_samples=8), SGD(lr=0.05, momentum=0.9)
    problem = inprocess.problem_of(cap, 4, 8)
    plan = make_plan(problem, "test", [(mask, 1) for mask in random_partition(problem.graph, 4, random.Random(name))], 8)
    job = inprocess.make_job(cap, problem, plan, OneFOneB(), model=model, data=data, optimizer=optimizer, steps=2, dtype="float64")
    losses, state, _ = inprocess.run(job, tmp_path, weights)
    expected, params = inprocess.reference(model, data, optimizer, weights, steps=2, minibatch_size=8, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-9)
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("name", "schedule"), [("mmt_small", OneFOneB()), ("gpt_small", GPipe())])
def test_several_stages_of_a_device_and_clipping_equal_one_device(name: str, schedule: AbstractSchedule, tmp_path: Path) -> None:
    """Five stages dealt out to three devices, one replicated; gradients clipped by the norm over all of them."""
    model, cap, weights = inprocess.captured_named(name)
    data, optimizer = data_of(model), SGD(lr=0.05, momentum=0.9, clip_norm=0.05)
    problem = inprocess.problem_of(cap, 3, 16, regime=Regime(holds=schedule.holds))
    masks = random_partition(problem.graph, 5, random.Random(11))
    where = [(0,), (1, 2), (0,), (2,), (1,)]
    parts = [(mask, len(devices)) for mask, devices in zip(masks, where, strict=True)]
    plan = make_plan(problem, "test", parts, [4, 4, 2, 4, 8], placement=where, ordered=True)
    job = inprocess.make_job(cap, problem, plan, schedule, model=model, data=data, optimizer=optimizer, steps=4, dtype="float64")
    losses, state, workers = inprocess.run(job, tmp_path, weights)
    expected, params = inprocess.reference(model, data, optimizer, weights, steps=4, minibatch_size=16, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-9)
    for tensor_name, tensor in params.items():
        torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8, msg=lambda m, n=tensor_name: f"{n}: {m}")
    norms = {float(worker.gradients.norm) for worker in workers if worker.gradients.norm is not None}
    assert len(norms) == 1 and norms.pop() > 0.05  # all agree, and it was clipped


@pytest.mark.parametrize("engine", ["workers", "reference"])
def test_the_norm_of_all_gradients_is_that_of_one_device_and_changes_nothing(engine: str, tmp_path: Path) -> None:
    """Stages dealt out to three devices, one replicated, with tied weights; the workers sum it, nobody clips."""
    model, cap, weights = inprocess.captured_named("gpt_small")
    data, optimizer = data_of(model), SGD(lr=0.05, momentum=0.9)
    logged: list[dict[str, float]] = []
    states = []
    for asked in (False, True):
        chosen = replace(optimizer, log_gradient_norm=asked)
        problem = inprocess.problem_of(cap, 3, 16, global_norm=chosen.norm_for is not None)
        where = [(0,), (1, 2), (0,)]
        masks = random_partition(problem.graph, 3, random.Random(11))
        parts = [(mask, len(devices)) for mask, devices in zip(masks, where, strict=True)]
        plan = make_plan(problem, "test", parts, [4, 4, 8], placement=where, ordered=True)
        job = inprocess.make_job(
            cap, problem, plan, OneFOneB(), model=model, data=data, optimizer=chosen, steps=STEPS, dtype="float64"
        )
        assert ("N0" in job.program.to_text()) == asked
        if engine == "reference":
            pipeline = Pipeline(job, weights)
            found = list(pipeline.train(0, STEPS))
            states.append({name: tensor.clone() for name, tensor in pipeline.named().items()})
        else:
            job.save(tmp_path / str(asked), weights)
            workers = inprocess.workers_of(job, tmp_path / str(asked))
            found = list[dict[str, float]]()
            for step in range(STEPS):  # each is a stretch of its own, since the pipeline drains
                inprocess.in_threads([partial(worker.train, step, 1, found.append) for worker in workers])
            states.append({name: t.clone() for w in workers for m in w.modules.values() for name, t in m.state_dict().items()})
        assert all(("gradient_norm" in record) == asked for record in found)
        logged += [record for record in found if asked]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    with inprocess.recorded_gradients() as gradients:
        _, params = inprocess.reference(model, data, optimizer, weights, steps=STEPS, minibatch_size=16, dtype="float64")
    for step in range(STEPS):
        squares = sum(float(gradients(param)[step].square().sum()) for param in params.values())
        mine = {record["gradient_norm"] for number, record in enumerate(logged) if record.get("step", number) == step}
        assert len(mine) == 1 and mine.pop() == pytest.approx(squares**0.5, rel=1e-9)


def test_evaluation_of_an_odd_number_of_samples(tmp_path: Path) -> None:
    model, cap, weights = inprocess.captured_named("digits")
    data = DigitsData()
    problem = inprocess.problem_of(cap, 4, 16)
    rng = random.Random(1)
    plan = make_plan(problem, "test", [(mask, 1 + (i == 0)) for i, mask in enumerate(random_partition(problem.graph, 3, rng))], 8)
    job = inprocess.make_job(
        cap,
        problem,
        plan,
        OneFOneB(),
        model=model,
        data=data,
        optimizer=SGD(lr=0.1, momentum=0.9),
        steps=1,
        dtype="float64",
        held_out=77,
    )
    _, state, workers = inprocess.run(job, tmp_path, weights)
    found: dict[str, float] = {}
    for shares in inprocess.in_threads([w.evaluate for w in workers]):
        for name, value in shares.items():
            found[name] = found.get(name, 0.0) + value
    network = model.build().double().eval()
    network.load_state_dict(state)
    samples = data.load("test", model, seed=0, dtype="float64").fetch(list(range(77)))
    with torch.no_grad():
        logits = network(**{k: v for k, v in samples.items() if not k.startswith("target:")})
    target = next(v for k, v in samples.items() if k.startswith("target:"))
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), abs=1e-12)
    assert found["metric:accuracy"] == pytest.approx((logits.argmax(-1) == target).double().mean().item(), abs=1e-12)


def test_learning_rate_schedule_reaches_the_optimizer(tmp_path: Path) -> None:
    model, cap, weights = inprocess.captured_named("digits")
    data = DigitsData()
    optimizer = SGD(lr=0.1, momentum=0.9, learning_rate=LearningRate(shape="cosine", warmup_steps=2))
    problem = inprocess.problem_of(cap, 2, 16)
    plan = make_plan(problem, "test", [(mask, 1) for mask in random_partition(problem.graph, 2, random.Random(3))], 4)
    job = inprocess.make_job(cap, problem, plan, OneFOneB(), model=model, data=data, optimizer=optimizer, steps=6, dtype="float64")
    losses, _, _ = inprocess.run(job, tmp_path, weights)
    expected, _ = inprocess.reference(model, data, optimizer, weights, steps=6, minibatch_size=16, dtype="float64")
    constant, _ = inprocess.reference(model, data, SGD(lr=0.1, momentum=0.9), weights, steps=6, minibatch_size=16, dtype="float64")
    assert losses == pytest.approx(expected, abs=1e-9)
    assert losses != pytest.approx(constant, abs=1e-4)
