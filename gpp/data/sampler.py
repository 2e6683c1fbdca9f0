"""The samples that a step trains on: a pure function of the step, so that a resumed run goes on exactly."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gpp.errors import InvalidConfig


@lru_cache(maxsize=2)
def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. num_samples - 1, read-only, int64; each epoch has its own."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    order.setflags(write=False)
    return order


def minibatch(step: int, minibatch_size: int, num_samples: int, seed: int) -> list[int]:
    """The sample indices of a step, counted from 0.

    An epoch has num_samples // minibatch_size steps; the ragged end of its order is left out.

    Raises:
        InvalidConfig: the data set is smaller than one mini-batch.
    """
    if not 1 <= minibatch_size <= num_samples:
        rule = f"must be in 1 .. {num_samples}, the number of samples"
        raise InvalidConfig("minibatch_size", minibatch_size, rule, "a smaller mini-batch, or more samples")
    epoch, start = position(step, minibatch_size, num_samples)
    return epoch_order(num_samples, seed, epoch)[start : start + minibatch_size].tolist()


def position(step: int, minibatch_size: int, num_samples: int) -> tuple[int, int]:
    """(epoch, place in its order) at which a step begins, all counted from 0."""
    epoch, steps = divmod(step, num_samples // minibatch_size)
    return epoch, steps * minibatch_size
