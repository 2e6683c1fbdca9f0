"""Training on stages gives the single device's losses and weights, whatever the plan."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.reference.pipeline import Pipeline
from gpp import SGD, Adam, GPipe, LearningRate, OneFOneB, RMSprop
from gpp.runtime.job import restore
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.inprocess import data_of
from tests.support.long import thinned
from tests.support.one_device import SGDM, equals_one_device, job_of

MODELS = ["digits", "mmt_small", "dlrm_small", "gpt_small"]
MORE = [
    *("bridge_tower", "candle_uno", "clip", "evoformer", "flava", "gnmt", "imagebind", "inception", "llava", "residual_lstm"),
    *("resnet", "translator", "unet", "vgg"),
]
"""Those whose operators and shapes others have, too."""
CASES = [
    *thinned((name, 0) for name in MODELS),
    *(pytest.param(name, 0, marks=pytest.mark.long) for name in ("digits_deep", "digits_tasks", *(f"{m}_small" for m in MORE))),
    *(pytest.param(name, seed, marks=pytest.mark.long) for name in MODELS for seed in (1, 2)),
]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_random_plans_equal_one_device(name: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{name}{seed}")
    adaptive = [Adam(lr=1e-3), Adam(lr=1e-3, weight_decay=0.1, decoupled=True), RMSprop(lr=1e-3, momentum=0.5)]
    schedule, optimizer, count = rng.choice([OneFOneB(), GPipe()]), rng.choice([SGDM, *adaptive]), rng.randint(2, 4)
    job, weights = job_of(
        name,
        (count, f"{name}{seed}"),
        [rng.choice([2, 4, 8]) for _ in range(count)],
        replicas=[rng.choice([1, 1, 2]) for _ in range(count)],
        chain=rng.random() < 0.3,
        schedule=schedule,
        optimizer=optimizer,
        max_ops=rng.choice([10, 16, 24]),
        steps=5,
    )
    equals_one_device(job, weights, tmp_path)


@pytest.mark.parametrize("sizes", thinned([[2, 2, 4], [4, 4, 4]]))
def test_two_forwards_two_backwards_equal_one_device(sizes: list[int], tmp_path: Path) -> None:
    """k = 2 at the first two stages: they keep more samples and run backwards in pairs. The rate changes with every step."""
    falling = replace(SGDM, learning_rate=LearningRate(shape="cosine", warmup_steps=2))
    job, weights = job_of("mmt_small", (3, 7), sizes, replicas=[1, 2, 1], k=[2, 2, 1], ordered=True, optimizer=falling, steps=5)
    assert [stage.k for stage in job.plan.stages] == [2, 2, 1]
    assert len({falling.learning_rate.factor(step, 5) for step in range(5)}) > 3
    equals_one_device(job, weights, tmp_path)


@pytest.mark.parametrize(("name", "schedule"), [("mmt_small", OneFOneB()), ("gpt_small", GPipe())])
def test_several_stages_of_a_device_and_clipping_equal_one_device(name: str, schedule: AbstractSchedule, tmp_path: Path) -> None:
    """Five stages dealt out to three devices, one replicated; gradients clipped by the norm over all of them."""
    where, clipped = [(0,), (1, 2), (0,), (2,), (1,)], replace(SGDM, clip_norm=0.05)
    given: dict[str, Any] = {"schedule": schedule, "where": where, "ordered": True, "optimizer": clipped, "steps": 4}
    _, _, workers = equals_one_device(*job_of(name, (5, 11), [4, 4, 2, 4, 8], **given), tmp_path)
    norms = {float(worker.gradients.norm) for worker in workers if worker.gradients.norm is not None}
    assert len(norms) == 1 and norms.pop() > 0.05  # all agree, and it was clipped


@pytest.mark.parametrize("engine", ["workers", "reference"])
def test_the_norm_of_all_gradients_is_that_of_one_device_and_changes_nothing(engine: str, tmp_path: Path) -> None:
    """Stages dealt out to three devices, one replicated, with tied weights; the workers sum it, nobody clips."""
    logged, states, steps = list[dict[str, float]](), [], 2
    for asked in (False, True):
        chosen = replace(SGDM, log_gradient_norm=asked)
        job, weights = job_of("gpt_small", (3, 11), [4, 4, 8], where=[(0,), (1, 2), (0,)], ordered=True, optimizer=chosen)
        assert ("N0" in job.program.to_text()) == asked
        if engine == "reference":
            pipeline = Pipeline(job, weights)
            found = list(pipeline.train(0, steps))
            states.append({name: tensor.clone() for name, tensor in pipeline.named().items()})
        else:
            job.save(tmp_path / str(asked), weights)
            workers = inprocess.workers_of(job, tmp_path / str(asked))
            found = list[dict[str, float]]()
            for step in range(steps):  # each is a stretch of its own, since the pipeline drains
                inprocess.in_threads([partial(worker.train, step, 1, found.append) for worker in workers])
            states.append({name: t.clone() for w in workers for m in w.modules.values() for name, t in m.state_dict().items()})
        assert all(("gradient_norm" in record) == asked for record in found)
        logged += [record for record in found if asked]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    model = restore(job.settings.model)
    with inprocess.recorded_gradients() as gradients:
        _, params = inprocess.reference(model, data_of(model), SGDM, weights, steps=steps, minibatch_size=16)
    for step in range(steps):
        squares = sum(float(gradients(param)[step].square().sum()) for param in params.values())
        mine = {record["gradient_norm"] for number, record in enumerate(logged) if record.get("step", number) == step}
        assert len(mine) == 1 and mine.pop() == pytest.approx(squares**0.5, rel=1e-9)


def test_evaluation_of_an_odd_number_of_samples(tmp_path: Path) -> None:
    job, weights = job_of("digits", (3, 1), 8, replicas=[2, 1, 1], optimizer=SGD(lr=0.1, momentum=0.9), steps=1, held_out=77)
    _, state, workers = inprocess.run(job, tmp_path, weights)
    found: dict[str, float] = {}
    for shares in inprocess.in_threads([w.evaluate for w in workers]):
        for name, value in shares.items():
            found[name] = found.get(name, 0.0) + value
    model = restore(job.settings.model)
    network = model.build().double().eval()
    network.load_state_dict(state)
    samples = data_of(model).load("test", model, seed=0, dtype="float64").fetch(list(range(77)))
    with torch.no_grad():
        logits = network(**{k: v for k, v in samples.items() if not k.startswith("target:")})
    target = next(v for k, v in samples.items() if k.startswith("target:"))
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), abs=1e-12)
    assert found["metric:accuracy"] == pytest.approx((logits.argmax(-1) == target).double().mean().item(), abs=1e-12)
