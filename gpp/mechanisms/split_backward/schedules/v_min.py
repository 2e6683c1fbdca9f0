"""V-Min (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024): about a third of the memory of 1F1B.

The least that a V can hold: every pass of a micro-batch comes right after the one before. Filling and draining takes about two
thirds of 1F1B's, if all passes take as long; where they do not, devices wait for each other in every block.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.split_backward.schedules.repeating import AbstractRepeating, Steps
from gpp.settings import settings


@final
@settings("strategy.schedule")
class VMin(AbstractRepeating):
    """One slot a stage everywhere."""

    share: ClassVar[float] = 1 / 3
    steps: ClassVar[Steps] = Steps(down=1, up=1, back_down=1, back_up=1)
