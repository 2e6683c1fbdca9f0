"""What a pipeline's training over a loader is made of: the scheduler at its place, the loader's batches, their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpp.errors import InvalidConfig


def set_scheduler(scheduler: Any, done: int) -> None:
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


def batches_of(loader: Iterable[Any], skipped: int) -> Iterator[Any]:
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


def samples_of(inputs: Any) -> int:
    """Samples of a batch: the first size of its first tensor."""
    while not hasattr(inputs, "shape"):
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)
