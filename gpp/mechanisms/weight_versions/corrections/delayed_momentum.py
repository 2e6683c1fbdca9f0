"""AsyncPP's momentum (Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization", ICML 2025).

With Nesterov's look-ahead the momentum itself makes up for the delay, if it is high enough; the later a stage's gradients, the
higher. A stage that is D - 1 - k updates late in a pipeline of D stages has

    b_k = b + (D - 1 - k) (0.99 - b) / D

in place of the optimizer's first factor b, as the authors' code computes it. Meant for `optimizer=nadam` on
`strategy/weights=stash`.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.settings import Decay, settings


@final
@settings("strategy.weights.correction")
class DelayedMomentum(AbstractCorrection):
    """More momentum at stages that are later.

    Args:
        highest: what the momentum would be at a delay of as many updates as there are stages.
    """

    name: ClassVar[str] = "delayed_momentum"
    highest: Decay = 0.99

    def momentum(self, momentum: float, delay: int, depth: int) -> float:
        return momentum + delay * (self.highest - momentum) / depth
