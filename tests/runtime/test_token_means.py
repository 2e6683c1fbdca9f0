"""Losses that are means over items (the labels that count, the ones of a mask): those of one device, however the batch is cut."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.reference.pipeline import run_reference
from gpp import SGD, GPipe, OneFOneB, ZeroBubbleH1
from gpp.capture.build import capture
from gpp.capture.coupling import uneven
from gpp.capture.stage import initial_state
from gpp.data.sampler import minibatch
from gpp.data.tensors import Tensors, write
from gpp.errors import CaptureError
from gpp.graph.captured import Captured
from gpp.models.losses import module_of
from gpp.plan.build import make_plan
from gpp.plan.loss_stage import coarsen_for, loss_mask, with_loss_apart
from gpp.runtime.cut_batches import ANOTHER_ENGINE, cut_warnings
from gpp.runtime.job import Job
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess
from tests.support.long import thinned
from tests.support.staged import parts_of

IGNORED, BATCH, UPDATES, LENGTH, CLASSES = -100, 16, 2, 5, 5
SAMPLES, HELD_OUT = 32, 12


class Reader(nn.Module):
    """Tokens [B, T] -> scores [B, T, 5] in three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = nn.Embedding(7, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.s2(self.s1(self.s0(x)))


class Tempered(nn.Module):
    """Cross entropy with weights of classes and a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.register_buffer("weight", torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        scores = scores.flatten(0, 1) / self.temperature
        return F.cross_entropy(scores, labels.flatten(), weight=self.weight, label_smoothing=0.1)  # type: ignore[arg-type]


def each(scores: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token [B * T]; that of a label that is left out counts, too."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")


def over_labels(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def likelihood(scores: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(scores.log_softmax(-1).transpose(1, 2), labels)


def over_a_mask(scores: Tensor, labels: Tensor) -> Tensor:
    return (each(scores, labels) * (labels.flatten() >= 0)).sum() / (labels >= 0).sum().clamp(min=1)


def by_the_inverse(scores: Tensor, labels: Tensor) -> Tensor:
    return (each(scores, labels) * (labels.flatten() >= 0)).sum() * (1 / (labels >= 0).sum().double())


def by_means(scores: Tensor, labels: Tensor) -> Tensor:
    return (each(scores, labels) * (labels.flatten() >= 0)).mean() / (labels >= 0).double().mean()


def several_at_once(scores: Tensor, labels: Tensor) -> Tensor:
    """Two means over items and one over samples in one number."""
    of_class = (labels.flatten() == 1).double()
    return over_labels(scores, labels) + 0.5 * (each(scores, labels) * of_class).sum() / of_class.sum() + scores.square().mean()


def terms(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"labels": over_labels(scores, labels), "size": 0.1 * scores.square().mean()}


def unrecognised(scores: Tensor, labels: Tensor) -> Tensor:
    """The same mean, by a mask that seems to follow from the scores."""
    mask = (labels.flatten() >= 0) & (scores.detach().flatten(0, 1).sum(-1) > -1e9)
    return (each(scores, labels) * mask).sum() / mask.sum()


COUNTED = {"": lambda tokens, labels: (labels >= 0).sum()}
RECOGNISED = (over_labels, likelihood, over_a_mask, by_the_inverse, by_means, several_at_once, terms)


def padded(num: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [num, T] of texts of 0 to T words; what follows a text's end has the label that is ignored."""
    random = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(7, (num, LENGTH), generator=random), torch.randint(CLASSES, (num, LENGTH), generator=random)
    lengths = torch.randint(0, LENGTH + 1, (num, 1), generator=random)
    lengths[num // 4 : num // 2] = 0  # whole micro-batches without a label
    return tokens, labels.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)


def captured(loss: Callable[..., Any], items: dict[str, Any] | None = None) -> tuple[Reader, Captured]:
    torch.manual_seed(0)
    network = Reader().double()
    zeros = torch.zeros(2, LENGTH, dtype=torch.long)
    return network, capture(network, {"x": zeros}, zeros, loss, name="reader", items=items)


def job_of(
    network: Reader, found: Captured, folder: Path, schedule: AbstractSchedule, loss: Any, scope: str = "microbatch"
) -> tuple[Job, dict[str, Tensor]]:
    """Three stages, the last with two replicas, whose micro-batches are of different sizes."""
    for split, num in (("train", SAMPLES), ("test", HELD_OUT)):
        tokens, labels = padded(num)
        write(folder / "data", split, {"x": tokens, "target:target": labels})
    graph = coarsen_for(found, 16, scope) if scope == "minibatch" else found.graph
    problem = replace(inprocess.problem_of(found, 4, BATCH), graph=graph)
    problem = replace(problem, minibatch_ops=loss_mask(found, graph)) if scope == "minibatch" else problem
    parts = [(mask, 1 + (i == 2)) for i, mask in enumerate(filter(None, parts_of(graph)))]
    plan = make_plan(problem, "test", parts, [2, 2, 4] if schedule == OneFOneB() else 4)
    plan = with_loss_apart(plan, problem) if scope == "minibatch" else plan
    data, optimizer = Tensors(folder=str(folder / "data")), SGD(lr=0.2, momentum=0.0)
    own = {"model": None, "data": data, "optimizer": optimizer, "steps": UPDATES, "held_out": HELD_OUT}  # tensors need no model
    job = inprocess.make_job(found, problem, plan, schedule, **own)
    return job, {name: tensor.clone() for name, tensor in initial_state(network, found, module_of(loss)).items()}


def total(value: Any) -> Tensor:
    return sum(value.values(), start=torch.zeros(())) if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("loss", "items", "schedule", "scope"),
    [
        *thinned(((loss, None, OneFOneB(), "microbatch") for loss in (*RECOGNISED, Tempered())), 7),
        (by_means, None, ZeroBubbleH1(), "microbatch"),
        pytest.param(unrecognised, COUNTED, GPipe(), "microbatch", marks=pytest.mark.long),
        pytest.param(unrecognised, COUNTED, ZeroBubbleH1(), "microbatch", marks=pytest.mark.long),
        # In torchtitan (#2972) the pipeline differentiated the sum over tokens, and divided the logged loss alone by their number.
        (over_labels, None, OneFOneB(), "minibatch"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__),
)
def test_losses_weights_and_evaluations_are_those_of_one_device(
    loss: Callable[..., Any], items: dict[str, Any] | None, schedule: AbstractSchedule, scope: str, tmp_path: Path
) -> None:
    network, found = captured(loss, items)
    assert found.coupled is False
    job, weights = job_of(network, found, tmp_path, schedule, loss, scope)
    losses, state, workers = inprocess.run(job, tmp_path / "run", weights)
    trained, expected = [*network.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())], []
    optimizer = torch.optim.SGD(trained, lr=0.2)
    samples = Tensors(folder=str(tmp_path / "data")).load("train", None, seed=0, dtype="float64")  # type: ignore[arg-type]
    for step in range(UPDATES):
        rows = samples.fetch(minibatch(step, BATCH, SAMPLES, 0))
        optimizer.zero_grad()
        value = total(loss(network(rows["x"]), rows["target:target"]))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert losses == pytest.approx(expected, abs=1e-13)
    for name, param in network.named_parameters():
        torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-13)
    if isinstance(loss, Tempered):
        torch.testing.assert_close(state["loss.temperature"], loss.temperature.detach(), rtol=0, atol=1e-13)
        assert abs(loss.temperature.item() - 0.7) > 1e-4
    again, _ = run_reference(job, weights)
    assert again == pytest.approx(expected, abs=1e-13)
    held_out = inprocess.in_threads([worker.evaluate for worker in workers])
    tokens, labels = padded(HELD_OUT)
    with torch.no_grad():
        whole = float(total(loss(network(tokens), labels)))
    assert sum(value for share in held_out for name, value in share.items() if "loss" in name) == pytest.approx(whole, abs=1e-13)


@pytest.mark.parametrize("loss", [over_labels, over_a_mask])
def test_engines_that_run_the_users_own_module_are_warned_of_unequally_many_labels(loss: Callable[..., Any]) -> None:
    """torchtitan, https://github.com/pytorch/torchtitan/issues/2972: nobody tells these what the whole mini-batch has."""
    _, found = captured(loss)
    tokens, labels = padded(BATCH)
    rows = {"x": tokens, "target:target": labels}
    assert not uneven(found, rows) and uneven(found, rows, weighs=False)
    assert not uneven(found, {"x": tokens, "target:target": labels.clamp(min=0)}, weighs=False)
    problem = inprocess.problem_of(found, 1, BATCH)
    plan = make_plan(problem, "test", [(problem.graph.all_mask, 1)], 2)
    (warning,) = cut_warnings(found, plan, whole_loss=False, words=ANOTHER_ENGINE, uneven=True)
    assert "some samples have more than others" in warning and warning.endswith("loss.scope=minibatch")


def test_a_mean_that_is_not_recognised_is_warned_of_by_the_labels_and_counted_by_items() -> None:
    tokens, labels = padded(BATCH)
    rows = {"x": tokens, "target:target": labels.index_fill(1, torch.tensor([0]), 1)}  # each sample has a label
    assert uneven(captured(unrecognised)[1], rows) and not uneven(captured(unrecognised, COUNTED)[1], rows)
    with pytest.raises(CaptureError, match=r"does not follow from inputs and targets alone.*items="):
        captured(unrecognised, {"": lambda tokens, labels: 3})
    with pytest.raises(CaptureError, match=r"items are given of \['loss:other'\]"):
        captured(terms, {"other": COUNTED[""]})


VOCABULARY = 70_000


class Large(nn.Module):
    """Tokens [B, T] -> scores over a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def by_the_scores(scores: Tensor, labels: Tensor) -> Tensor:
    mask = (scores.detach().amax(-1) > 0.9).flatten()
    return (each(scores, labels) * mask).sum() / mask.sum()


def shifted(scores: Tensor, labels: Tensor) -> Tensor:
    return over_labels(scores[:, :-1], labels[:, 1:])


@pytest.mark.parametrize(("loss", "coupled"), thinned([(by_the_scores, True), (shifted, False), (over_a_mask, False)], 3))
def test_a_large_vocabulary_is_decided_like_a_small_one(loss: Callable[..., Any], coupled: bool) -> None:
    """Above 64 MiB nothing was known, and that passed as fine."""
    with torch.device("meta"):
        network, tokens = Large(), torch.zeros(2, 48, dtype=torch.long)
    assert capture(network, {"x": tokens}, tokens.clone(), loss, name="large").coupled is coupled


def test_what_stays_unknown_is_told() -> None:
    """A logarithm of made-up scores is no number."""
    _, found = captured(lambda scores, labels: (scores - 2).log().mean() + 0 * labels.sum())
    assert found.coupled is None
    problem = inprocess.problem_of(found, 1, BATCH)
    plan = make_plan(problem, "test", [(problem.graph.all_mask, 1)], 2)
    (warning,) = cut_warnings(found, plan, whole_loss=False)
    assert "is unknown" in warning and "loss.scope=minibatch" in warning
