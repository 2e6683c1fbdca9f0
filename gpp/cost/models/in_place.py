"""Operator times corrected by stages that were timed in place.

An operator takes another time inside a stage than alone: what came before it is still in a cache, or is not; kernels
are dispatched while others run; gradients are added up or are new. So whole stages of plans are timed as they run
(`gpp.runtime.rehearsal`), and the times of their operators are scaled until every stage's sum is what was measured. The
times stay a sum over operators: planners, bounds and the simulator go on as before, and a plan whose stages were timed
is predicted by the times of these stages.

Several plans cut the graph differently, so an operator is in several timed stages. Scaling stage after stage, round
after round, is iterative proportional fitting: it converges to the times nearest to those measured alone, in relative
entropy, with the given sums, if there are any.

Source: Deming and Stephan, "On a least squares adjustment of a sampled frequency table when the expected marginal
totals are known", 1940; Csiszár, "I-divergence geometry of probability distributions and minimization problems", 1975.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from gpp.settings import Count, Natural, NotNegative

ROUNDS = 50
"""Rounds of the fitting: plans that contradict each other (by noise) do not converge, and the last one measured is met."""

LARGEST = 8.0
"""Factor by which an operator's time is corrected at most: beyond it one of the measurements was disturbed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """A stage as it ran in place, on one device.

    Args:
        ops: its operators.
        samples: of a micro-batch on one device.
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
        stages: those measured, the latest last; all of their `samples` are among `counts`.

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
    """[num_ops] factors by which operator times reach the given sums; the last of them are met exactly."""
    out = np.ones_like(seconds)
    for _ in range(ROUNDS):
        before = out.copy()
        for ops, total in sums:
            index = list(ops)
            have = float((seconds[index] * out[index]).sum())
            if have > 0 and total > 0:
                out[index] = np.clip(out[index] * (total / have), 1 / LARGEST, LARGEST)
        if np.allclose(before, out, rtol=1e-6, atol=0.0):
            break
    return out


def update_s_per_byte(stages: Iterable[StageTimes]) -> float | None:
    """Seconds of the optimizer's step for each byte, over all stages that have one; None where none has."""
    own = [(stage.update_s, stage.trainable_bytes) for stage in stages if stage.update_s and stage.trainable_bytes]
    total = sum(num_bytes for _, num_bytes in own)
    return sum(seconds for seconds, _ in own) / total if total else None
