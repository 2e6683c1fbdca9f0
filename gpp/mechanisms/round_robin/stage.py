"""The stages whose replicas take whole micro-batches in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpp.stage import AbstractStageValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(AbstractStageValue):
    """Replicas that take turns.

    Args:
        whole: replica j mod R runs all of micro-batch j, forward and backward, and gradients are summed over the replicas at the
            update; else every replica runs a part of each micro-batch.
    """

    name: ClassVar[str] = "round_robin"
    dealt: ClassVar[str] = "in turn"
    earlier: ClassVar[Mapping[str, str]] = {"round_robin": "whole"}
    without: ClassVar[str] = "strategy.replicas=split"
    whole: bool = False

    def stride(self, replicas: int) -> int:
        return replicas if self.whole else 1


Value = RoundRobin

IN_TURN = RoundRobin(whole=True)
