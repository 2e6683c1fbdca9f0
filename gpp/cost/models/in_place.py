"""Operator times corrected by stages that were timed in place.

An operator takes another time inside a stage than alone: what came before it is still in a cache, or is not; kernels
are dispatched while others run; gradients are added up or are new. So whole stages of plans are timed as they run
(`gpp.runtime.rehearsal`), and every operator's time gets a factor, so that the sums are what was measured. The times
stay a sum over operators: planners, bounds and the simulator go on as before, and a plan whose stages were timed is
predicted by the times of these stages.

Several plans cut the graph differently, so an operator is in several timed stages, and times have noise: where two plans
differ in one small operator, the difference of two large times says nothing of it. So the factors are those that are
most likely, if factors scatter by `SCATTER` around that of the whole graph, and times by `NOISE`: linear regression with a
normal prior (ridge regression).

Source: Hoerl and Kennard, "Ridge regression: biased estimation for nonorthogonal problems", 1970.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from gpp.settings import Count, Natural, NotNegative

SCATTER = 0.5
"""Standard deviation of operators' factors, relative to that of the whole graph."""

NOISE = 0.02
"""Standard deviation of a stage's time in place, relative to itself."""

SMALLEST = 0.1
"""Factor by which an operator's time is corrected at least."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """A stage as it ran in place, on one device.

    Args:
        ops: its operators.
        samples: samples of a micro-batch on one device.
        forward_s, backward_s: seconds of its operators in one pass, without the fixed cost of a pass.
        update_s: seconds of the optimizer's step; None where it has none.
        trainable_bytes: bytes that the step is about.
    """

    ops: tuple[Natural, ...]
    samples: Count
    forward_s: NotNegative
    backward_s: NotNegative
    update_s: NotNegative | None = None
    trainable_bytes: NotNegative = 0.0


def corrected(
    forward_s: np.ndarray, backward_s: np.ndarray, counts: Sequence[int], stages: Iterable[StageTimes]
) -> tuple[np.ndarray, np.ndarray]:
    """Operator times that agree with stages timed in place.

    A count that was not measured in place is corrected as the nearest one that was (by ratio).

    Args:
        forward_s, backward_s: [num_ops, len(counts)] seconds of operators timed alone.
        counts: samples of each column, ascending.
        stages: the measured stages, the latest last; all of their `samples` are among `counts`.

    Returns:
        Both tables, scaled.
    """
    found = list(stages)
    sizes = sorted({stage.samples for stage in found})
    if not sizes:
        return forward_s, backward_s
    factors = {}
    for size in sizes:
        own, column = [stage for stage in found if stage.samples == size], counts.index(size)
        factors[size] = (
            _factors(forward_s[:, column], [(stage.ops, stage.forward_s) for stage in own]),
            _factors(backward_s[:, column], [(stage.ops, stage.backward_s) for stage in own]),
        )
    nearest = [min(sizes, key=lambda size: (abs(math.log(size / count)), size)) for count in counts]
    return (
        forward_s * np.stack([factors[size][0] for size in nearest], axis=1),
        backward_s * np.stack([factors[size][1] for size in nearest], axis=1),
    )


def _factors(seconds: np.ndarray, sums: Sequence[tuple[tuple[int, ...], float]]) -> np.ndarray:
    """[num_ops] factors by which operator times come to the given sums."""
    kept = [(list(ops), total) for ops, total in sums if total > 0 and seconds[list(ops)].sum() > 0]
    if not kept:
        return np.ones_like(seconds)
    whole = sum(total for _, total in kept) / sum(float(seconds[ops].sum()) for ops, _ in kept)
    rows = np.zeros((len(kept), len(seconds)))
    for row, (ops, total) in zip(rows, kept, strict=True):
        row[ops] = seconds[ops] / (NOISE * total)
    # In units of their standard deviations: what the times leave unexplained, and how far factors are from the whole's.
    table = np.vstack([rows * (SCATTER * whole), np.eye(len(seconds))])
    target = np.concatenate([1 / NOISE - rows.sum(axis=1) * whole, np.zeros(len(seconds))])
    away = np.linalg.lstsq(table, target, rcond=None)[0]
    return np.maximum(whole * (1.0 + SCATTER * away), SMALLEST * whole)


def update_s_per_byte(stages: Iterable[StageTimes]) -> float | None:
    """Seconds of the optimizer's step for each byte, over all stages that have one; None where none has."""
    own = [(stage.update_s, stage.trainable_bytes) for stage in stages if stage.update_s and stage.trainable_bytes]
    total = sum(num_bytes for _, num_bytes in own)
    return sum(seconds for seconds, _ in own) / total if total else None
