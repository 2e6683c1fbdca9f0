"""PipeMare's first technique, learning-rate rescheduling (Yang et al., MLSys 2021, arXiv 1910.05124).

The rate of a stage whose gradients are tau updates late is divided by a power of tau that falls to 0 over the first K updates:

    r_k = r / tau^p,    p = 1 - min(k / K, 1)

Steps that a delay would make unstable come early in training, when the gradient changes fast.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.settings import Count, settings


@final
@settings("strategy.weights.correction")
class Rescheduled(AbstractCorrection):
    """A lower rate at late stages in the beginning.

    Args:
        over: updates over which the rate comes back to the optimizer's own (K).
    """

    name: ClassVar[str] = "rescheduled"
    over: Count = 300

    def rate(self, delay: int, update: int) -> float:
        return max(delay, 1) ** -(1.0 - min(update / self.over, 1.0))
