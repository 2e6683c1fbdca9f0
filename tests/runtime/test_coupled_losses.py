"""A loss that compares the samples of the mini-batch with each other: whatever the micro-batches, it is that of one device."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpp import SGD, GPipe, OneFOneB, Plan
from gpp.capture.build import capture
from gpp.data.synthetic import Synthetic
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.plan.build import make_plan
from gpp.plan.loss_stage import coarsen_for, loss_mask, with_loss_apart
from gpp.runtime.cut_batches import IN_STEPS, OF_A_LOOP, cut_warnings
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.one_device import equals_one_device
from tests.support.problems import random_partition
from tests.support.training import held_out_loss

CLIP = ("clip_small", "model.loss=gpp.models.networks.clip.contrastive_loss", "model.image_layers=1", "model.text_layers=1")
DATA, OPTIMIZER, STEPS = Synthetic(num_samples=48, num_test_samples=36), SGD(lr=0.05, momentum=0.9), 2


def planned(found: Captured, size: int | list[int], seed: int, replicas: int = 1):
    problem = inprocess.problem_of(found, 5, 16)
    fine = coarsen_for(found, 16, "minibatch")
    problem = replace(problem, graph=fine, minibatch_ops=loss_mask(found, fine))
    parts = [(mask, replicas if i == 0 else 1) for i, mask in enumerate(random_partition(fine, 3, random.Random(seed)))]
    return problem, with_loss_apart(make_plan(problem, "test", parts, size), problem)


@pytest.mark.parametrize("schedule", thinned([OneFOneB(), GPipe()]), ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("size", "replicas"), thinned([([2, 8, 4], 2), (2, 1), (8, 1), (4, 2)]))
def test_losses_and_gradients_of_clip_equal_one_device(
    size: int | list[int], replicas: int, schedule: AbstractSchedule, tmp_path: Path
) -> None:
    model, found, weights = inprocess.captured_named(*CLIP)
    assert found.coupled
    problem, plan = planned(found, size, seed=3, replicas=replicas)
    assert plan.stages[-1].microbatch_size == 16 and plan.shares_devices
    own = {"model": model, "data": DATA, "optimizer": OPTIMIZER, "steps": STEPS, "held_out": 36}
    job = inprocess.make_job(found, problem, plan, schedule, **own)
    _, state, workers = equals_one_device(job, weights, tmp_path, gradients_within=1e-8)
    check_evaluation(model, state, workers)


def check_evaluation(model, state, workers) -> None:
    """Held-out samples count by mini-batches: 16, 16 and the last 4."""
    shares = inprocess.in_threads([worker.evaluate for worker in workers])
    batches = [range(lo, min(lo + 16, 36)) for lo in range(0, 36, 16)]
    expected = sum(held_out_loss(model, DATA, state, rows) * len(rows) / 36 for rows in batches)
    assert sum(share.get("loss", 0.0) for share in shares) == pytest.approx(expected, abs=1e-9)


def test_cut_micro_batches_make_it_another_loss(tmp_path: Path) -> None:
    """What the scope is for."""
    model, found, weights = inprocess.captured_named(*CLIP)
    problem, whole = planned(found, 4, seed=3)
    plan: Plan = make_plan(problem, "test", [(sum(1 << op for op in s.ops), 1) for s in whole.stages], 4)
    cut = replace(problem, minibatch_ops=0)
    job = inprocess.make_job(found, cut, plan, OneFOneB(), model=model, data=DATA, optimizer=OPTIMIZER, steps=1)
    losses, _, _ = inprocess.run(job, tmp_path, weights)
    expected, _ = inprocess.reference_of(job, weights)
    assert abs(losses[0] - expected[0]) > 0.1


MEAN, SUM = torch.nn.functional.mse_loss, torch.nn.MSELoss(reduction="sum")
LOSSES = {
    "mean": (lambda y, t: MEAN(y, t), False, False),
    "mean over a part": (lambda y, t: (y - t).square().sum(1).mean(), False, False),
    "sum": (lambda y, t: SUM(y, t), True, True),
    "sum by hand, divided by a number": (lambda y, t: (y - t).square().sum() / 4, True, True),
    "one term of two": (lambda y, t: {"a": MEAN(y, t), "b": 0.1 * SUM(y, t)}, True, True),
    "compared with each other": (lambda y, t: (y - y.mean(0)).square().mean() + 0.0 * t.mean(), True, False),
}


class _OwnLoss(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().sum()


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_samples_is_told_from_a_mean_and_from_a_comparison(name: str) -> None:
    measure, coupled, summed = LOSSES[name]
    network = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    found = capture(network, {"input": torch.zeros(2, 5)}, torch.zeros(2, 3), measure, name="small")
    assert (found.coupled, found.summed) == (coupled, summed)
    problem = inprocess.problem_of(found, 2, 16)
    plan = make_plan(problem, "test", [(problem.graph.all_mask, 1)], 4)
    warnings = cut_warnings(found, plan, whole_loss=False)
    assert ["sum over the samples" in line for line in warnings] == [summed] * coupled
    assert not coupled or "loss.scope=minibatch" in warnings[0]
    for words, said in (
        (OF_A_LOOP, "gpp.Loss(function=..., scope='minibatch')"),
        (IN_STEPS, "gpp.problem(..., loss_scope='minibatch')"),
    ):
        assert not coupled or said in cut_warnings(found, plan, whole_loss=False, words=words)[0]
    assert not cut_warnings(found, plan, whole_loss=True)
    assert not cut_warnings(found, replace(plan, minibatch_size=4), whole_loss=False)


def test_a_sum_is_noticed_where_the_network_makes_its_own_loss() -> None:
    found = capture(_OwnLoss(5, 4), {"input": torch.zeros(2, 5)}, torch.zeros(2), lambda loss, target: loss, name="own")
    assert found.summed and found.coupled and not found.loss_ops
    plan = make_plan(inprocess.problem_of(found, 1, 16), "test", [(found.graph.all_mask, 1)], 4)
    (warning,) = cut_warnings(found, plan, whole_loss=False)
    assert warning.endswith("Fix: reduce by the mean")


def test_a_trained_table_that_a_forward_changes_is_told_of_with_replicas() -> None:
    """Each replica shortens the rows that its own samples read."""
    network = torch.nn.Sequential(torch.nn.Embedding(9, 4, max_norm=1.0), torch.nn.Linear(4, 3))
    found = capture(network, {"input": torch.tensor([1, 2])}, torch.zeros(2, 3), MEAN, name="small")
    problem = inprocess.problem_of(found, 2, 8)
    told = [cut_warnings(found, make_plan(problem, "test", [(found.graph.all_mask, n)], 4), whole_loss=False)[1:] for n in (1, 2)]
    assert not told[0] and "0.weight is trained, and changed by each forward" in told[1][0]


def test_logits_that_the_network_makes_belong_to_the_loss() -> None:
    """Logits [B, B] cannot be cut by samples: whoever makes them is computed with the loss."""

    class Pairs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(5, 4), torch.nn.Linear(5, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.a(x) @ self.b(y).T

    def measure(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, torch.arange(logits.shape[0])) + 0.0 * target.mean()

    inputs = {"x": torch.zeros(2, 5), "y": torch.zeros(2, 5)}
    found = capture(Pairs(), inputs, torch.zeros(2), measure, name="pairs")
    assert found.coupled
    graph: OpGraph = coarsen_for(found, 16, "minibatch")
    (loss_op,) = [op for i, op in enumerate(graph.ops) if loss_mask(found, graph) >> i & 1]
    assert any("matmul" in node for node in loss_op.nodes) and not any("linear" in node for node in loss_op.nodes)
