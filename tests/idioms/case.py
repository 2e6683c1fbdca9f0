"""What users do to modules, parameters, buffers, losses and optimizers, each tried against a plain loop in float64.

A case is equal (all steps' losses, all parameters and buffers, and the loss of an evaluation are those of the plain loop), refused
(an error says why) or warned of (it may differ, and a warning says so). What differs without a word is a defect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gpp
from gpp.errors import GppError, WorkerFailed
from gpp.runtime.engine import Progress
from gpp.runtime.worker.seat import pass_seed

SIZE, MICROBATCH, STEPS, D = 8, 2, 3, 6
"""Samples of a mini-batch and of a micro-batch, steps, and the width of most layers."""
TOLERANCE = 1e-10

Kind = Literal["equal", "refused", "warned"]
Batch = tuple[Any, Any]
"""Inputs and targets, as `pipeline.step` takes them; targets None where the loss takes the outputs alone."""


def mean_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def sgd(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def rows(*shape: int) -> Tensor:
    return torch.randn(SIZE, *shape, dtype=torch.float64)


def batches(inputs: Callable[[], Any] = lambda: rows(D), targets: Callable[[], Any] = lambda: rows(3)) -> list[Batch]:
    return [(inputs(), targets()) for _ in range(STEPS)]


@dataclass
class Made:
    """What one of a case's two trainings is made of.

    Args:
        data: a mini-batch for each step.
        optimizer: of the plain loop, and of the pipeline if `settings` name none.
        settings: arguments of `gpp.parallelize`.
        whole: whether a micro-batch is the mini-batch and the model is one stage; random numbers are those of the plain loop then.
        between: called after each step with the number of steps done.
        clip: gradients' largest norm in the plain loop.
        each: called after each step with the weights by name.
        kept: tensors of the case's own that are compared, too.
    """

    model: nn.Module
    data: list[Batch] = field(default_factory=batches)
    loss: Any = mean_squares
    optimizer: Any = sgd
    settings: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    between: Callable[[int], None] = lambda done: None
    clip: float | None = None
    each: Callable[[Mapping[str, Tensor]], None] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def of_loss(self) -> nn.Module:
        """The loss if it is a module, whose parameters are trained with the model's; else an empty one."""
        return self.loss if isinstance(self.loss, nn.Module) else nn.Module()


@dataclass(frozen=True)
class Idiom:
    """A row of the table.

    Args:
        name: as users would say it.
        kind: what is to happen.
        theme: heading of its part of the table.
        words: a part of the refusal or of the warning.
        fix: what to write in its place.
    """

    name: str
    theme: str
    make: Callable[[], Made]
    kind: Kind
    words: str
    fix: str


@dataclass(frozen=True)
class Outcome:
    """What has happened: `kind` is `silent` where the pipeline differs and says nothing, `failed` where it broke down."""

    kind: Literal["equal", "refused", "warned", "silent", "failed"]
    said: tuple[str, ...] = ()
    difference: float = 0.0


IDIOMS: list[Idiom] = []


def idiom(
    name: str, kind: Kind, words: str = "", fix: str = "", *, theme: str
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Put a function that makes a case's training among the idioms."""

    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        IDIOMS.append(Idiom(name, theme, make, kind, words, fix))
        return make

    return keep


@dataclass(frozen=True)
class Trained:
    """Losses of the steps and of an evaluation at the end, and tensors by name."""

    losses: list[float]
    tensors: dict[str, Tensor]

    def difference(self, other: Trained) -> float:
        """The largest, over losses and numbers of tensors."""
        if self.tensors.keys() != other.tensors.keys():
            return float("inf")
        pairs = [(torch.tensor(self.losses), torch.tensor(other.losses))]
        pairs += [(self.tensors[name], tensor) for name, tensor in other.tensors.items()]
        found = 0.0
        for one, two in pairs:
            if one.shape != two.shape:
                return float("inf")
            if one.numel():
                far = (one.detach().to(torch.complex128) - two.detach().to(torch.complex128)).abs().max().item()
                found = max(found, far if far == far else float("inf"))
        return found


def tried(case: Idiom, folder: Path, workers: Callable[[], AbstractContextManager[None]]) -> Outcome:
    """Train both ways.

    Args:
        folder: of the run.
        workers: a context in which `gpp.parallelize` starts the workers that are wanted.
    """
    said: list[str] = []
    made = _made(case)
    try:
        with workers():
            found = _piped(made, folder, said)
    except WorkerFailed as error:
        return Outcome("failed", (str(error),))
    except GppError as error:
        return Outcome("refused", (str(error),))
    far = _plain(_made(case)).difference(found)
    if case.words and any(case.words in words for words in said):
        return Outcome("warned", tuple(said), far)
    return Outcome("equal" if far <= TOLERANCE else "silent", tuple(said), far)


def agrees(case: Idiom, found: Outcome) -> bool:
    """Whether a case went as its row of the table says, with the words that it has there."""
    return found.kind == case.kind and (not case.words or any(case.words in said for said in found.said))


def _made(case: Idiom) -> Made:
    torch.manual_seed(1)
    random.seed(1)
    made = case.make()
    made.model.double()
    return made


def _plain(made: Made) -> Trained:
    """The loop as torch's tutorials have it."""
    params = [p for p in (*made.model.parameters(), *made.of_loss.parameters()) if p.requires_grad]
    optimizer = made.optimizer if isinstance(made.optimizer, torch.optim.Optimizer) else made.optimizer(params)
    losses = []
    for step, (inputs, targets) in enumerate(made.data):
        torch.manual_seed(pass_seed(0, step, 0, 0, 0))
        value = _value(made, inputs, targets)
        optimizer.zero_grad()
        value.backward()
        if made.clip is not None:
            nn.utils.clip_grad_norm_(made.model.parameters(), made.clip)
        optimizer.step()
        losses.append(value.item())
        if made.each:
            made.each(made.model.state_dict())
        made.between(step + 1)
    made.model.eval()
    with torch.no_grad():
        losses.append(_value(made, *made.data[0]).item())
    return Trained(losses, {**_own(made.model), **_own(made.of_loss, "loss."), **made.kept})


def _own(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Parameters and lasting buffers by name."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    passing = {
        f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in module._non_persistent_buffers_set
    }
    return {prefix + name: tensor.detach().clone() for name, tensor in tensors.items() if name not in passing}


def _value(made: Made, inputs: Any, targets: Any) -> Tensor:
    model = made.model
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    else:
        outputs = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
    if made.loss is None:
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    if isinstance(targets, tuple | list):
        targets = {str(i): target for i, target in enumerate(targets)}
    found = made.loss(outputs) if targets is None else made.loss(outputs, targets)
    return torch.stack(list(found.values())).sum() if isinstance(found, Mapping) else found


def _piped(made: Made, folder: Path, said: list[str]) -> Trained:
    size, word = (SIZE, "even planner=single") if made.whole else (MICROBATCH, "even")
    given = {
        "loss": made.loss,
        "devices": 1 if made.whole else 2,
        "strategy": gpp.Planning(strategy=word, microbatch_size=size, cost=gpp.Analytical()),
        "optimizer": made.optimizer,
        "run": gpp.Run(folder=folder, progress=Progress(warn=said.append)),
        **made.settings,
    }
    inputs, targets = made.data[0]
    with ExitStack() as stack:
        pipeline = gpp.parallelize(made.model, inputs, targets, **given)
        stack.callback(pipeline.__exit__, GppError, GppError("left"), None)
        losses = []
        for step, (inputs, targets) in enumerate(made.data):
            losses.append(pipeline.step(inputs, targets))
            if made.each:
                made.each(pipeline.state_dict())
            made.between(step + 1)
        losses.append(pipeline.evaluate(*made.data[0])["loss"])
        state = pipeline._weights()
    # As `close` does it, without the run's report.
    from gpp.runtime.checkpoint.state import copy_into

    copy_into(pipeline.model, state, made.of_loss)
    return Trained(losses, {**_own(made.model), **_own(made.of_loss, "loss."), **made.kept})
