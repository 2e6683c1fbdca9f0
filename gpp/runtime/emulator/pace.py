"""The pace of an emulation: seconds of this machine for one second of the emulated cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpp.settings import Positive, Seconds, settings

Overhead = Annotated[float, Field(gt=0, lt=1, examples=[0.005])]

SHORTEST_S = 2.0
"""Least time of a paced step: in shorter ones this machine's scheduler, now and then milliseconds late, would show."""


@settings("engine")
class Pace:
    """Rule by which workers choose the time scale, from a first step in which nobody waits for a clock.

    That step shows both what the plan takes (the virtual clock) and what the runtime takes by itself here, with so
    many workers on so few cores. The scale makes the second small beside the first.

    Args:
        budget_s: seconds that the paced steps may take together.
        overhead: the share of a step that the runtime itself may take.
        time_scale: given by the user; None lets the rule choose.
    """

    budget_s: Seconds
    overhead: Overhead
    time_scale: Positive | None = None

    def choose(self, virtual_s: float, unpaced_s: float, paced_steps: int) -> float:
        """The time scale: large enough for `overhead` and for steps of `SHORTEST_S`, no larger than `budget_s` allows.

        Args:
            virtual_s: one step on the cluster described.
            unpaced_s: the same step here without waiting for any clock.
            paced_steps: number of steps that follow.
        """
        if self.time_scale is not None:
            return self.time_scale
        if virtual_s <= 0:
            return 1.0
        return min(max(unpaced_s / self.overhead, SHORTEST_S), self.budget_s / paced_steps) / virtual_s
