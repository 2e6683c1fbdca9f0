"""A pipeline's training over a loader: steps, the scheduler, evaluations, hooks and a progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpp.errors import InvalidConfig
from gpp.report.run.console import StepProgress, make_console
from gpp.runtime.engine import OnStep


class Stepping(Protocol):
    """What is asked of a pipeline (`gpp.app.pipeline.Pipeline`)."""

    losses: list[float]

    @property
    def done(self) -> int:
        """Steps of the training so far."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints."""
        ...

    @property
    def has_targets(self) -> bool:
        """Whether a batch is inputs and targets."""
        ...

    def step(self, inputs: Any, targets: Any = None) -> float:
        """Train on a mini-batch; its loss."""
        ...

    def evaluate(self, inputs: Any, targets: Any = None) -> dict[str, float]:
        """Loss and metrics of a mini-batch."""
        ...

    def evaluated(self, values: dict[str, float]) -> None:
        """Tell what an evaluation has found."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated during a training.

    Args:
        batch: a mini-batch as the loader has them; None for none.
        every: steps between two evaluations, of which the last has one, too; 0 for the last alone.
    """

    batch: Any = None
    every: int = 0


def train(
    pipeline: Stepping,
    loader: Iterable[Any],
    steps: int | None = None,
    *,
    scheduler: Any = None,
    on_step: OnStep | None = None,
    evaluation: Evaluation | None = None,
) -> list[float]:
    """Train on a loader's batches, again and again until there were enough; the losses of the steps that were done.

    A pipeline that goes on from a checkpoint passes over the batches that the training had before, and sets the scheduler to where
    it was, so a loader that has the same batches each time gives the training that was not interrupted.

    Args:
        loader: of (inputs, targets), or of inputs where the examples had no targets.
        steps: all steps of the training, counted from its very first one; None: once through the loader.
        scheduler: of torch's, over the optimizer that `gpp.parallelize` was given; it takes a step after each step.
        on_step: called after each step: (steps done, loss, samples per second).
        evaluation: its results go to `on_evaluation` of the pipeline's progress.

    Raises:
        InvalidConfig: `steps` are done already, or the loader is empty or ends before; a batch is not as the examples are.
        WorkerFailed: a worker died.
    """
    if steps is None:
        if not hasattr(loader, "__len__"):
            raise InvalidConfig(
                "steps", None, "must be said for a loader without a length", "say pipeline.train(loader, steps=100)"
            )
        steps = pipeline.done + len(loader)  # type: ignore[arg-type]
    if steps <= pipeline.done:
        rule = f"counts all steps of the training, of which {pipeline.done} are done"
        raise InvalidConfig("steps", steps, rule, f"say steps={pipeline.done + 100}")
    _set(scheduler, pipeline.done)
    evaluation, first = evaluation or Evaluation(), len(pipeline.losses)
    batches = _batches(loader, pipeline.done if not first else 0)
    with StepProgress(make_console(quiet=not pipeline.leads), total=steps) as bar:
        while pipeline.done < steps:
            inputs, targets = _pair(pipeline, next(batches))
            began = time.perf_counter()
            loss = float(pipeline.step(inputs, targets))
            rate = _samples(inputs) / (time.perf_counter() - began)
            if scheduler is not None:
                scheduler.step()
            bar.update(pipeline.done, loss, rate)
            if on_step is not None:
                on_step(pipeline.done, loss, rate)
            if evaluation.batch is not None and (
                pipeline.done == steps or (evaluation.every and pipeline.done % evaluation.every == 0)
            ):
                pipeline.evaluated(pipeline.evaluate(*_pair(pipeline, evaluation.batch)))
    return pipeline.losses[first:]


def _set(scheduler: Any, done: int) -> None:
    """Let a scheduler be where it is after so many steps of the training.

    Raises:
        InvalidConfig: it asks for more than the number of steps.
    """
    if scheduler is None:
        return
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        rule = "must be a scheduler of torch's that follows the number of steps"
        raise InvalidConfig("scheduler", type(scheduler).__name__, rule, "call its step yourself, in on_step")
    while scheduler.last_epoch < done:
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # the workers' has stepped
        scheduler.step()


def _batches(loader: Iterable[Any], skipped: int) -> Iterator[Any]:
    """The batches after the first `skipped` ones, from the loader's begin again at its end.

    Raises:
        InvalidConfig: the loader is empty, or can be gone through once only.
    """
    count = 0
    while True:
        before = count
        for batch in loader:
            count += 1
            if count > skipped:
                yield batch
        if count == before:
            fix = "give a list or a DataLoader, which can be gone through again, or fewer steps"
            raise InvalidConfig("loader", type(loader).__name__, f"has ended after {count} batches", fix)


def _samples(inputs: Any) -> int:
    """Samples of a batch: the first size of its first tensor."""
    while not hasattr(inputs, "shape"):
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


def _pair(pipeline: Stepping, batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch of a loader."""
    if not pipeline.has_targets:
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        rule = "must be (inputs, targets), as the examples were"
        raise InvalidConfig("batch", type(batch).__name__, rule, "yield pairs; several inputs are a tuple, or a dict by name")
    return batch[0], batch[1]
