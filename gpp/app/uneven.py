"""The amounts of a run's samples in its planning problem, where the work differs from sample to sample (`gpp.cost.uneven`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpp.cost.problem import Problem
from gpp.cost.uneven import UnevenSamples, Varying, varying_shares
from gpp.data.base import Samples
from gpp.data.sampler import minibatch
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.runtime.job import Job

if TYPE_CHECKING:
    from torch import Tensor

LOOKED_AT = 256
"""Mini-batches, at most, that predictions are made for: the 90th percentile of so many is known to about 2 % of the spread."""


def with_varying(
    problem: Problem, captured: Captured, asked: UnevenSamples, samples: Callable[[], Samples] | None, *, steps: int, seed: int
) -> Problem:
    """The problem with the amounts of the first mini-batches that a run draws; as it is where all samples are alike.

    Args:
        samples: loads those of the training; None where nothing is trained.

    Raises:
        InvalidConfig: names the setting and the fix.
    """
    if asked.amount is None:
        return problem
    if samples is None:
        raise InvalidConfig("uneven.amount", asked.amount, "is for trainings", "set uneven.amount=null")
    shares, data = varying_shares(captured, problem.graph, asked.amount), samples()
    from gpp.runtime.even import amounts_of

    size, count = min(problem.minibatch_size, len(data)), min(steps, LOOKED_AT)
    batches = [minibatch(step, size, len(data), seed) for step in range(count)]
    drawn = sorted({index for batch in batches for index in batch})
    known = dict(zip(drawn, amounts_of(data.fetch(drawn, {asked.amount})[asked.amount]), strict=True))
    return replace(problem, varying=_varying(asked, shares, [np.array([known[i] for i in batch]) for batch in batches]))


def from_examples(problem: Problem, captured: Captured, asked: UnevenSamples, rows: Mapping[str, Tensor]) -> Problem:
    """The problem with amounts of mini-batches drawn out of one example (bootstrap), as only its samples are known."""
    if asked.amount is None:
        return problem
    from gpp.runtime.even import amounts_of

    shares = varying_shares(captured, problem.graph, asked.amount)
    own, random = amounts_of(rows[asked.amount]), np.random.default_rng(0)
    batches = [random.choice(own, problem.minibatch_size) for _ in range(LOOKED_AT)]
    return replace(problem, varying=_varying(asked, shares, batches))


def _varying(asked: UnevenSamples, shares: tuple[float, ...], batches: list[np.ndarray]) -> Varying:
    mean = float(np.mean(np.concatenate(batches)))
    return Varying(shares=shares, amount=mean, batches=tuple(batches), evened=asked.evened, quantile=asked.quantile)


def evened_rows(job: Job, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A mini-batch by captured names, its samples in the order that makes micro-batches even."""
    import torch

    from gpp.runtime.even import EvenOrder

    even = EvenOrder(job)
    if even.amount is None:
        return rows
    order = torch.from_numpy(even.of(rows[even.amount].cpu()))
    return {name: tensor[order.to(tensor.device)] for name, tensor in rows.items()}
