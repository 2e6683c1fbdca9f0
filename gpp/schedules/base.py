"""What a schedule promises: the order of a stage's own passes, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from gpp.plan.plan import Plan

Pass = tuple[str, int]
"""("F" or "B", micro-batch)."""


class AbstractSchedule(ABC):
    """Emits compute actions only; `gpp.schedules.passes` adds communication, reduction, update.

    An order is that of one replica, and so are `num_microbatches`, and the numbers of micro-batches in it: where replicas take
    turns (`Stage.round_robin`), number m is micro-batch m R + r of the stage.
    """

    in_flight: ClassVar[Literal["depth", "all"]]
    """What a stage keeps under this order; planners reckon memory with it."""
    drains: ClassVar[bool] = True
    """Whether a pass is one mini-batch, after which the pipeline is empty; else it may be any number of them."""

    @abstractmethod
    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        """Forwards before the first backward, if one backward and one forward alternate from then on; None if they do not."""

    @abstractmethod
    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        """A replica's passes in order: each F before its B, both first-in first-out (condition C4)."""
