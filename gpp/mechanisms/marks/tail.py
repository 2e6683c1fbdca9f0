"""vPipe's way to make a stage fit: swaps that fill the link, and its last operators recomputed as one run.

What the stage's operators make goes to the host from its first operator on, whose outputs wait longest, as far as copies hide
behind a period. If that does not do, the shortest tail of the stage is computed again with which it fits, as one run; what is left
of the swaps stands before it. That the tail is one run of the last operators, and swaps fill the link, is published; that swaps
come first, and begin at the stage's first operator, is ours.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, final

import numpy as np

from gpp.cost.problem import Remembered
from gpp.mechanisms.marks.choices import HAIR, Choices, Judged, Marking
from gpp.mechanisms.marks.policies import AbstractMarking, repeatable
from gpp.memory import Question
from gpp.settings import settings

_TAILS = Remembered[tuple[object, ...], tuple[Judged | None, float]]()


@final
@settings("strategy.memory")
class Tail(AbstractMarking):
    """The last operators of a stage are computed again as one run, behind swaps that fill the link, where it lacks memory.

    Args:
        swap: whether what operators make may go to the host.
    """

    name: ClassVar[str] = "tail"
    ways: ClassVar[Collection[str]] = ("recompute", "offload")
    swap: bool = True

    def marks(self, asked: Question) -> Judged | None:
        return self._tried(asked)[0]

    def lacking(self, asked: Question) -> float:
        """Bytes by which a stage overflows with the leanest of the tails that are tried; 0 where one fits."""
        found, least = self._tried(asked)
        return 0.0 if found else least - asked.limit_bytes

    def _tried(self, asked: Question) -> tuple[Judged | None, float]:
        ways: Collection[str] = self.ways if self.swap else ("recompute",)
        known, again = _TAILS.of(asked.problem), repeatable(asked)
        key = asked.stage.keeping, asked.held, asked.limit_bytes, asked.depth, frozenset(again), tuple(ways)
        if key not in known:
            known[key] = _shortest(Choices(asked.problem, asked.stage, asked.held, ways, asked.depth, again), asked.limit_bytes)
        return known[key]


def _shortest(choices: Choices, limit: float) -> tuple[Judged | None, float]:
    """The marking with a shortest tail that fits, with swaps if they do, else without; None if none does. And the least peak of all
    that were tried.

    A longer tail mostly takes less, so the shortest one is found by bisection below the first of a few lengths that fits.
    """
    n = len(choices.stage.ops)
    # Of operators that may not be computed again a tail holds none.
    longest = 0 if not choices.recomputes else n if choices.able.all() else int(np.argmin(choices.able[::-1]))

    least = float("inf")

    def fitting(length: int) -> Judged | None:
        nonlocal least
        for swapped in (True, False) if choices.offloads else (False,):
            judged = choices.judge(_marking(choices, length, swapped))
            least = min(least, judged.peak)
            if judged.fits(limit):
                return judged
        return None

    low, best = -1, None
    for eighth in range(9):
        length = longest * eighth // 8
        best = fitting(length) if length > low else None
        if best is not None:
            break
        low = max(low, length)
    if best is None:
        return None, least
    high = len(best.marking.recompute)
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best, least


def _marking(choices: Choices, length: int, swapped: bool) -> Marking:
    """A tail of some operators, and swaps before it as far as they hide."""
    ops = choices.stage.ops
    head, tail = ops[: len(ops) - length], ops[len(ops) - length :]
    if not swapped:
        return Marking(recompute=tail)
    saved = choices.tensors.saved[: len(head)]
    within = np.cumsum(saved) <= choices.hidden * (1 + HAIR)
    return Marking(recompute=tail, offload=tuple(op for op, size, fits in zip(head, saved, within, strict=True) if size and fits))
