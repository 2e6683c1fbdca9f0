"""Losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpp
from tests.idioms.case import SIZE, D, Made, batches, idiom, rows
from tests.idioms.parameters import Between

on = partial(idiom, theme="Losses")


def classes(loss: Any, **more: Any) -> Made:
    return Made(Between(nn.Linear(D, D)), batches(targets=lambda: torch.randint(3, (SIZE,))), loss, **more)


def numbers(loss: Any, **more: Any) -> Made:
    return Made(Between(nn.Linear(D, D)), loss=loss, **more)


@on("a module, a `functools.partial`, label smoothing", "equal")
def smoothing() -> Made:
    return classes(nn.CrossEntropyLoss(label_smoothing=0.1))


@on("`functools.partial(F.huber_loss, delta=0.5)`", "equal")
def partial_loss() -> Made:
    return numbers(partial(F.huber_loss, delta=0.5))


@on("class weights: `nn.CrossEntropyLoss(weight=w)`", "equal")
def class_weights() -> Made:
    return classes(nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)))


@on("`nn.BCEWithLogitsLoss(pos_weight=w)`", "equal")
def positive_weights() -> Made:
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    return Made(Between(nn.Linear(D, D)), batches(targets=lambda: torch.rand(SIZE, 3).double()), loss)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.log_scale.exp(), targets)


@on("a loss with a parameter of its own (a learnable temperature)", "equal")
def temperature() -> Made:
    return classes(Temperature())


@on("an auxiliary loss: a dict of terms", "equal")
def terms() -> Made:
    return numbers(lambda outputs, targets: {"main": F.mse_loss(outputs, targets), "small": 0.1 * outputs.pow(2).mean()})


@on("targets as a tuple", "equal")
def several_targets() -> Made:
    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(outputs, targets["0"]) + 0.3 * F.cross_entropy(outputs, targets["1"])

    return Made(Between(nn.Linear(D, D)), batches(targets=lambda: (rows(3), torch.randint(3, (SIZE,)))), loss)


@on("no targets: the loss takes the outputs", "equal")
def outputs_alone() -> Made:
    return Made(Between(nn.Linear(D, D)), [(x, None) for x, _ in batches()], lambda outputs: outputs.pow(2).mean())


@on("no loss: the model's outputs have it", "equal")
def own_loss() -> Made:
    class Own(Between):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    data = [({"x": rows(D), "labels": torch.randint(3, (SIZE,))}, None) for _ in range(3)]
    return Made(Own(nn.Linear(D, D)), data, None)


def lines(ignored: int) -> list[Any]:
    """Labels [B, 5], of which each sample leaves out another number of the last ones."""

    def labels() -> Tensor:
        found = torch.randint(3, (SIZE, 5))
        for row in range(SIZE):
            found[row, 5 - (row * 3) % 5 :] = ignored
        return found

    return batches(lambda: rows(5, D), labels)


@on("`ignore_index=-100` with unequal padding", "equal")
def ignored() -> Made:
    return Made(Between(nn.Linear(D, D)), lines(-100), lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))


@on("a mean over a mask (`(loss * mask).sum() / mask.sum()`)", "equal")
def masked() -> Made:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mask = (targets >= 0).double()
        each = F.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
        return (each * mask).sum() / mask.sum()

    return Made(Between(nn.Linear(D, D)), lines(-1), loss)


@on("a sum over samples", "warned", "is a sum over the samples", "a mean over samples")
def summed() -> Made:
    return numbers(partial(F.mse_loss, reduction="sum"))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
    return F.cross_entropy(scores * 5, torch.arange(len(scores)))


@on("a contrastive loss", "warned", "loss=gpp.Loss(function=..., scope='minibatch')", 'gpp.Loss(scope="minibatch")')
def compares() -> Made:
    return numbers(contrastive)


@on('a contrastive loss, `gpp.Loss(scope="minibatch")`', "equal")
def compares_whole() -> Made:
    return numbers(contrastive, settings={"loss": gpp.Loss(contrastive, scope="minibatch")})


@on("a penalty on the weights (`sum(p.pow(2).sum() for p in model.parameters())`)", "equal")
def penalty() -> Made:
    model = Between(nn.Linear(D, D))
    return Made(model, loss=lambda o, t: F.mse_loss(o, t) + 0.1 * sum(p.pow(2).sum() for p in model.parameters()))


@on(
    "a gradient penalty (`autograd.grad(create_graph=True)`)",
    "refused",
    "comes out of what a trace cannot follow",
    "the derivative as a formula",
)
def gradient_penalty() -> Made:
    class Given(Between):
        def forward(self, x: Tensor) -> Any:
            x = x.detach().requires_grad_()
            return x, super().forward(x)

    def loss(found: Any, targets: Tensor) -> Tensor:
        x, outputs = found
        if not outputs.requires_grad:
            return F.mse_loss(outputs, targets)
        (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return F.mse_loss(outputs, targets) + gradient.pow(2).mean()

    return Made(Given(nn.Linear(D, D)), loss=loss)


@on(
    "a weight of the loss that grows with a counter (`self.step += 1`)",
    "refused",
    "self.step += 1",
    "two pipelines, or a buffer of the model that counts",
)
def annealed() -> Made:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.step += 1
            return F.mse_loss(outputs, targets) * self.step

    return numbers(Annealed())


@on(
    "a weight of the loss that the program changes between steps",
    "warned",
    "was 1.0 when the workers started",
    "a new gpp.parallelize",
)
def changed_weight() -> Made:
    weight = {"w": 1.0}
    made = numbers(lambda outputs, targets: weight["w"] * F.mse_loss(outputs, targets))
    made.between = lambda done: weight.update(w=1.0 + done)
    return made


@on("`F.kl_div(reduction='batchmean')`, triplet and cosine losses", "equal")
def others() -> Made:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        kl = F.kl_div(outputs.log_softmax(1), targets.softmax(1), reduction="batchmean")
        triplet = F.triplet_margin_loss(outputs, targets, -targets)
        return kl + triplet + (1 - F.cosine_similarity(outputs, targets)).mean()

    return numbers(loss)


@on("a loss that returns a float", "refused", "data-dependent number", "return the tensor")
def no_tensor() -> Made:
    return numbers(lambda outputs, targets: F.mse_loss(outputs, targets).item())
