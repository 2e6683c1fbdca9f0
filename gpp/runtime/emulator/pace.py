"""How many seconds of this machine stand for one second of the emulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from gpp.errors import InvalidConfig

SHORTEST_S = 2.0
"""A paced step is no shorter here, or the milliseconds that this machine's scheduler is late now and then would show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The rule by which workers choose the time scale, from a first step in which nobody waits for a clock.

    That step shows both what the plan takes (the virtual clock) and what the runtime takes by itself here, with so
    many workers on so few cores. The scale makes the second small beside the first.

    Args:
        budget_s: seconds that the paced steps may take together.
        overhead: the share of a step that the runtime itself may take.
        time_scale: given by the user; None lets the rule choose.
    """

    budget_s: float
    overhead: float
    time_scale: float | None = None

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise InvalidConfig("engine.budget_s", self.budget_s, "must be above 0", "set engine.budget_s=60")
        if not 0 < self.overhead < 1:
            raise InvalidConfig("engine.overhead", self.overhead, "must be above 0 and below 1", "set engine.overhead=0.005")
        if self.time_scale is not None and not self.time_scale > 0:
            raise InvalidConfig("engine.time_scale", self.time_scale, "must be above 0, or null", "set engine.time_scale=null")

    def choose(self, virtual_s: float, unpaced_s: float, paced_steps: int) -> float:
        """The time scale: large enough for `overhead` and for steps of `SHORTEST_S`, no larger than `budget_s` allows.

        Args:
            virtual_s: one step on the cluster described.
            unpaced_s: the same step here without waiting for any clock.
            paced_steps: how many follow.
        """
        if self.time_scale is not None:
            return self.time_scale
        if virtual_s <= 0:
            return 1.0
        return min(max(unpaced_s / self.overhead, SHORTEST_S), self.budget_s / paced_steps) / virtual_s
