"""Gradients that other pipelines got silently wrong, as their users reported: the same situations here, beside plain PyTorch.

The losses looked right in all three reports; only the gradients were not. So every gradient of every update is compared, with plain
SGD and no clipping: Adam, or clipping by the norm, would hide a gradient that is a multiple of what it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.capture.build import capture
from gpp.capture.stage import initial_state
from gpp.data.base import Samples
from gpp.data.sampler import minibatch
from gpp.data.tensors import Tensors, write
from gpp.graph.captured import Captured
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.plan.loss_stage import coarsen_for, loss_mask, with_loss_apart
from gpp.runtime.job import Job
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support import inprocess
from tests.support.staged import DATA, captured, parts_of, problem_of

SGD_, BATCH, UPDATES = SGD(lr=0.2), 16, 2
IGNORED = -100
"""The label that `F.cross_entropy` leaves out unless it is told otherwise."""


def batches(samples: Samples, size: int, count: int) -> Iterator[dict[str, Tensor]]:
    """The mini-batches that the first updates train on."""
    return (samples.fetch(minibatch(step, size, len(samples), 0)) for step in range(count))


def check_gradients(job: Job, weights: dict[str, Tensor], folder: Path, expected: list[dict[str, Tensor]]) -> None:
    """Every stage's parameters have seen the expected gradients, one dict an update."""
    with inprocess.recorded_gradients() as gradients:
        _, _, workers = inprocess.run(job, folder, weights)
        compared = set[str]()
        for worker in workers:
            for name, param in worker.params.items():
                for mine, theirs in zip(gradients(param), expected, strict=True):
                    torch.testing.assert_close(mine, theirs[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
                    assert theirs[name].abs().max() > 1e-6
                compared.add(name)
        assert compared == set(expected[0])


def gradients_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.detach().clone() for name, param in network.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(("size", "schedule"), [(16, OneFOneB()), (4, GPipe()), (2, OneFOneB())])
def test_gradients_are_scaled_once_however_deep_the_stage(size: int, schedule: AbstractSchedule, tmp_path: Path) -> None:
    """DeepSpeed 0.19.2, https://github.com/deepspeedai/DeepSpeed/issues/8152: every stage divided what it got from the next one by
    the number of micro-batches, so that with M of them the gradients of the stage at distance d to the last were M^d times too
    small. It was found by the norms of the first stage; mended by pull request 8154 (July 2026)."""
    model, found, weights = captured("Chain4")
    problem = problem_of(found, schedule, 4)
    plan = make_plan(problem, "test", [(mask, 1) for mask in parts_of(found.graph)], size, ordered=True)
    assert [len(stage.pieces(BATCH)) for stage in plan.stages] == [BATCH // size] * 4 and plan.depth == 4
    job = inprocess.make_job(found, problem, plan, schedule, model=model, data=DATA, optimizer=SGD_, steps=UPDATES, dtype="float64")
    network, expected = model.build().double(), []
    network.load_state_dict(weights)
    optimizer = torch.optim.SGD(network.parameters(), lr=SGD_.lr)
    for values in batches(DATA.load("train", model, seed=0, dtype="float64"), BATCH, UPDATES):
        optimizer.zero_grad()
        F.mse_loss(network(values["x"]), values["target:y"]).backward()
        expected.append(gradients_of(network))
        optimizer.step()
    check_gradients(job, weights, tmp_path, expected)


OF_UPDATE, PARTS = 8, 4
"""Samples of an update, and the parts in which their gradients are accumulated."""


def accumulated(network: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a mini-batch, summed up part by part as users of plain PyTorch do."""
    network.zero_grad()
    for x, y in zip(values["x"].chunk(PARTS), values["target:y"].chunk(PARTS), strict=True):
        (F.mse_loss(network(x), y) / PARTS).backward()
    return gradients_of(network)


def test_accumulated_gradients_are_a_mean_and_not_a_decaying_one(tmp_path: Path) -> None:
    """torchtitan, https://github.com/pytorch/torchtitan/issues/1733: the pipeline divided the gradients by its number of
    micro-batches after each of the steps that were accumulated for an update, those of earlier steps again and again: a decaying
    mean in place of a sum. Mended by pull request 1732 (September 2025). Here what is accumulated is one mini-batch;
    test_async_equality.py has the pipelines that do not drain."""
    model, found, weights = captured("Chain4")
    problem = replace(problem_of(found, OneFOneB(), 4), minibatch_size=OF_UPDATE)
    parts = [(mask, 1) for mask in parts_of(found.graph)]
    plan = make_plan(problem, "test", parts, OF_UPDATE // PARTS, ordered=True)
    job = inprocess.make_job(
        found, problem, plan, OneFOneB(), model=model, data=DATA, optimizer=SGD_, steps=UPDATES, dtype="float64"
    )
    network, expected = model.build().double(), []
    network.load_state_dict(weights)
    optimizer = torch.optim.SGD(network.parameters(), lr=SGD_.lr)
    for values in batches(DATA.load("train", model, seed=0, dtype="float64"), OF_UPDATE, UPDATES):
        expected.append(accumulated(network, values))
        optimizer.step()
    check_gradients(job, weights, tmp_path, expected)


class Reader(nn.Module):
    """Tokens [B, T] -> scores [B, T, 5] in three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = nn.Embedding(7, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.s2(self.s1(self.s0(x)))


def over_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that count, as `F.cross_entropy` has it."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def padded(num: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and labels [num, length] of texts of 1 to `length` words; what follows a text's end has the label that is ignored."""
    random = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(7, (num, length), generator=random), torch.randint(5, (num, length), generator=random)
    lengths = torch.randint(1, length + 1, (num, 1), generator=random)
    return tokens, labels.masked_fill(torch.arange(length) >= lengths, IGNORED)


@pytest.fixture(scope="module")
def reader() -> tuple[Reader, Captured, dict[str, Tensor]]:
    torch.manual_seed(0)
    network = Reader().double()
    found = capture(
        network, {"x": torch.zeros(2, 5, dtype=torch.long)}, torch.zeros(2, 5, dtype=torch.long), over_labels, name="reader"
    )
    return network, found, {name: tensor.clone() for name, tensor in initial_state(network, found).items()}


def test_a_mean_over_the_labels_of_the_whole_mini_batch_is_differentiated(
    reader: tuple[Reader, Captured, dict[str, Tensor]], tmp_path: Path
) -> None:
    """torchtitan, https://github.com/pytorch/torchtitan/issues/2972 (April 2026): without a pipeline the loss was the sum over
    tokens divided by the number of valid tokens of the whole batch; the pipeline differentiated the sum and divided the logged loss
    alone, so that gradients were as many times too large as there were valid tokens. Here the mean over all valid tokens of the
    mini-batch is `loss.scope=minibatch`, whatever the micro-batches of the other stages; test_token_means.py has it without."""
    network, found, weights = reader
    tokens, labels = padded(BATCH)
    write(tmp_path / "data", "train", {"x": tokens, "target:target": labels})
    graph = coarsen_for(found, 16, "minibatch")
    problem = replace(inprocess.problem_of(found, 3, BATCH), graph=graph, minibatch_ops=loss_mask(found, graph))
    masks = [mask for mask in parts_of(graph) if mask]
    plan = with_loss_apart(make_plan(problem, "test", [(mask, 1) for mask in masks], 2, ordered=True), problem)
    assert {stage.microbatch_size for stage in plan.stages} == {2, BATCH}
    job = inprocess.make_job(
        found,
        problem,
        plan,
        OneFOneB(),
        model=None,  # type: ignore[arg-type]  # tensors need none
        data=Tensors(folder=str(tmp_path / "data")),
        optimizer=SGD_,
        steps=1,
        dtype="float64",
    )
    network.load_state_dict(weights)
    network.zero_grad()
    sums = F.cross_entropy(network(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    (sums / (labels != IGNORED).sum()).backward()
    check_gradients(job, weights, tmp_path / "run", [gradients_of(network)])
