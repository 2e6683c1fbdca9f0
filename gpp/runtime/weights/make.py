"""From a policy's value to what carries it out."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpp.runtime.weights.base import AbstractStageWeights
from gpp.runtime.weights.foreseen import Foreseen
from gpp.runtime.weights.kept import Kept
from gpp.runtime.weights.slots import Slots
from gpp.weights.base import AbstractWeights, Place


def stage_weights(policy: AbstractWeights, place: Place, module: nn.Module, **settings: Any) -> AbstractStageWeights:
    """The weights of a stage; `settings` as of `AbstractStageWeights`."""
    if policy.backward != "same":
        return Slots(policy, place, module, **settings)
    return (Foreseen if policy.predicts else Kept)(policy, place, module, **settings)
