"""Samples that make unequal work: the same training in any order, even micro-batches, and steps as predicted."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from gpp import SGD, Even, OneFOneB, Strategy, ZeroBubbleH1
from gpp.app.judging import bound_under, unbounded
from gpp.app.uneven import evened_rows, from_examples
from gpp.cost.uneven import UnevenSamples, Varying, evened, varying_shares
from gpp.data.pictured import Pictured
from gpp.errors import InvalidConfig
from gpp.plan.build import make_plan
from gpp.runtime.even import amounts_of
from gpp.simulate.spread import part_bounds, step_seconds
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.one_device import equals_one_device
from tests.support.split import halves

MINIBATCH, MICROBATCH, STEPS = 16, 4, 2
DATA = Pictured(num_samples=64, num_test_samples=16)
UNEVEN = UnevenSamples(amount="there")


def problem(minibatch_size: int = MINIBATCH):
    model, captured, weights = inprocess.captured_named("pictured_small")
    found = inprocess.problem_of(captured, 3, minibatch_size, max_ops=60)
    amounts = amounts_of(DATA.load("train", model, seed=0, dtype="float64").fetch(range(64), {"there"})["there"])
    batches = tuple(amounts[i : i + minibatch_size] for i in range(0, 64, minibatch_size))
    shares = varying_shares(captured, found.graph, "there")
    return model, captured, weights, replace(found, varying=Varying(shares=shares, amount=float(amounts.mean()), batches=batches))


def plan_of(found, replicas: int = 1):
    tower = max(op for op, share in enumerate(found.varying.shares) if share) + 1
    first, last = halves(found.graph, tower)
    return make_plan(found, "mine", [(first, replicas), (last, 1)], microbatch_size=MICROBATCH)


def test_parts_are_even_and_a_permutation() -> None:
    random = np.random.default_rng(0)
    worst = []
    for _ in range(50):
        amounts, bounds = random.integers(0, 9, 64) / 8, list(range(0, 65, 8))
        order = evened(amounts, bounds)
        assert sorted(order) == list(range(64))
        sums = [amounts[order[lo : lo + 8]].sum() for lo in bounds[:-1]]
        worst.append(max(sums) - min(sums))
    assert max(worst) <= 1 / 8 + 1e-9  # a picture more or less: as even as whole pictures can be
    odd = evened(amounts[:10], [0, 4, 8, 10])
    assert sorted(odd) == list(range(10))


@pytest.mark.parametrize("schedule", thinned([OneFOneB(), ZeroBubbleH1()]), ids=lambda schedule: schedule.name)
def test_even_micro_batches_train_as_one_device_does(schedule, tmp_path: Path) -> None:
    model, captured, weights, found = problem()
    plan, optimizer = plan_of(found, replicas=2), SGD(lr=0.1, momentum=0.9)
    made = {"model": model, "data": DATA, "optimizer": optimizer, "steps": STEPS}
    seen = []
    for asked in (UNEVEN, replace(UNEVEN, evened=False)):
        job = inprocess.make_job(captured, found, plan, schedule, uneven=asked, **made)
        _, _, workers = equals_one_device(job, weights, tmp_path / str(asked.evened), within=(1e-12, 1e-12))
        seen.append(list(workers[0].rows._orders.values()))
    assert seen[0] and not seen[1]
    masks = DATA.load("train", model, seed=0, dtype="float64").fetch(seen[0][0], {"there"})["there"]
    bounds = part_bounds(plan, found.varying, MINIBATCH)
    assert len(bounds) == 1 + 2 * MINIBATCH // MICROBATCH  # what each of the two replicas has of a micro-batch
    sums = [amounts_of(masks)[lo:hi].sum() for lo, hi in pairwise(bounds)]
    assert max(sums) - min(sums) <= 0.25


def test_steps_follow_the_work_of_their_own_micro_batches() -> None:
    *_, found = problem()
    strategy, plan = Strategy(name="test", planner=Even(), schedule=OneFOneB()), plan_of(found)
    varying = found.varying
    assert varying is not None

    def seconds(*batches: np.ndarray, even: bool = False) -> list[float]:
        asked = replace(found, varying=replace(varying, batches=batches, evened=even))
        return step_seconds(strategy.lower(plan, asked), plan, asked)

    # Steps of equal work are those of a plain simulation at that amount, after the first, which fills the pipeline.
    for amount in (0.0, 0.25, 1.0):
        at = replace(found, varying=replace(varying.at(amount), batches=()))
        assert seconds(*[np.full(MINIBATCH, amount)] * 4)[-1] == pytest.approx(strategy.predict(plan, at).metrics.iteration_s)
    lumps = np.repeat([0.0, 1.0], MINIBATCH // 2)
    in_order, even = seconds(*[lumps] * 3), seconds(*[lumps] * 3, even=True)
    assert even[-1] < in_order[-1]
    metrics = strategy.predict(plan, found).metrics
    assert metrics.spread is not None and metrics.spread.median_s == metrics.iteration_s <= metrics.spread.tail_s


def test_the_plan_is_the_best_of_those_judged() -> None:
    *_, found = problem()
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    chosen = strategy.plan(found)
    assert found.varying is not None
    mean = strategy.plan(replace(found, varying=replace(found.varying, judged=True)))
    tails = [strategy.predict(plan, found).metrics.spread.tail_s for plan in (chosen, mean)]
    assert tails[0] <= tails[1] and "90%" in chosen.explanation[-1]


def test_no_bound_is_known_of_a_median_step() -> None:
    """The bound is that of the mean amount, and the step that is predicted is the median of those that differ."""
    *_, found = problem()
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    assert unbounded(strategy, found) == "samples of unequal work"
    assert bound_under(strategy, found) is None and bound_under(strategy, replace(found, varying=None)) is not None


def test_amounts_that_cannot_be_are_refused() -> None:
    _, captured, _, found = problem()
    with pytest.raises(InvalidConfig, match=r"those of the model are: there\. Fix: set uneven\.amount=there"):
        varying_shares(captured, found.graph, "text")
    _, other, _ = inprocess.captured_named("mlp")
    with pytest.raises(InvalidConfig, match="must be an input of booleans"):
        varying_shares(other, other.graph, "x")
    with pytest.raises(InvalidConfig, match=r"data\.mask"):
        DATA.check(inprocess.captured_named("mlp")[0])


def test_a_loop_of_ones_own_is_evened_and_foreseen() -> None:
    model, captured, _, found = problem()
    plan, optimizer = plan_of(found), SGD(lr=0.1)
    made = {"model": model, "data": DATA, "optimizer": optimizer, "steps": STEPS}
    job = inprocess.make_job(captured, found, plan, OneFOneB(), uneven=UNEVEN, **made)
    rows = DATA.load("train", model, seed=0, dtype="float64").fetch(range(MINIBATCH))
    ordered = evened_rows(job, rows)
    key = lambda batch: sorted(batch["pictures"].flatten(1).sum(1).tolist())  # noqa: E731
    assert key(ordered) == key(rows) and not torch.equal(ordered["there"], rows["there"])
    sums = [amounts_of(ordered["there"])[i : i + MICROBATCH].sum() for i in range(0, MINIBATCH, MICROBATCH)]
    assert max(sums) - min(sums) <= 0.25
    foreseen = from_examples(replace(found, varying=None), captured, UNEVEN, rows).varying
    assert foreseen is not None and set(np.concatenate(foreseen.batches)) <= set(amounts_of(rows["there"]))
