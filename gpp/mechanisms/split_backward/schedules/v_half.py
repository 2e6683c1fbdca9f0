"""V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024): about half of the memory of 1F1B, in less time.

Filling and draining takes about half of 1F1B's, if all passes take as long.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.split_backward.schedules.repeating import AbstractRepeating, Steps
from gpp.settings import settings


@final
@settings("strategy.schedule")
class VHalf(AbstractRepeating):
    """Three slots a stage and back on either half of the V."""

    share: ClassVar[float] = 1 / 2
    steps: ClassVar[Steps] = Steps(down=1, up=2, back_down=1, back_up=2)
