"""The micro-batches that a stage holds under a schedule, given its place in the pipeline.

A micro-batch is held in full from its forward to its backward; where the backward is in parts, from the forward to the first of
them, and from there on *late* until the last is over: only what that needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np


class Held(NamedTuple):
    """Micro-batches that a stage holds on a device at a time: in full, and late."""

    full: int = 0
    late: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The micro-batches that stages hold just after a forward, in the midst of a mini-batch.

    `distance` counts the stages on the longest path from a stage to a sink, itself included; `depth` is the largest distance of
    the plan, `count` the micro-batches between two drains.

    Args:
        ahead: micro-batches held in full for each stage between this one and the sink, beyond one; None: all of them, wherever
            the stage is.
        levels: whether a stage holds micro-batches late until it holds as many, in full and late, as the first one does in full.
        parts: the kinds of passes that a stage with weights to train has in place of B; none: backwards are whole.
    """

    ahead: int | None = 1
    levels: bool = False
    parts: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether every micro-batch is held, wherever the stage is."""
        return self.ahead is None

    def full(self, distance: Any, count: Any) -> Any:
        """Micro-batches held in full; of numbers, or of arrays."""
        if self.ahead is None:
            return count
        need = 1 + self.ahead * (distance - 1)
        if isinstance(need, int) and isinstance(count, int):
            return min(need, count)
        return np.minimum(need, count)

    def late(self, distance: int, depth: int, count: int) -> int:
        """Micro-batches held late."""
        return self.full(depth, count) - self.full(distance, count) if self.levels else 0

    def furthest(self, fits: Any, count: Any, most: Any) -> np.ndarray:
        """The largest distance at which no more than so many micro-batches are held in full; 0 if that is none.

        Args:
            fits: micro-batches for which there is room.
            most: what to say where all of them fit, so that no distance is too large.
        """
        if self.ahead is None:
            return np.where(fits >= count, most, 0)
        return np.where(fits >= count, most, (fits - 1) // max(self.ahead, 1) + 1)

    def states(self, full: int, late: int) -> tuple[Held, ...]:
        """The fullest states of a stage that holds so many: after a forward, and after the first part of a backward."""
        return (Held(full, late), Held(full - 1, late + 1)) if self.parts and full else (Held(full, late),)


DEPTH: Final = Holding()
"""As many as a stage's distance to the sink: 1F1B."""

EVERYTHING: Final = Holding(ahead=None)
"""The whole mini-batch: GPipe."""
