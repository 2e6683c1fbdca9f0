"""Choice of the class that carries a weight policy out."""

from __future__ import annotations

from typing import Any

from torch import nn

from gpp.runtime.worker.weights.base import AbstractStageWeights
from gpp.runtime.worker.weights.foreseen import Foreseen
from gpp.runtime.worker.weights.kept import Kept
from gpp.runtime.worker.weights.slots import Slots
from gpp.weights.base import AbstractWeights, PipelinePosition


def stage_weights(policy: AbstractWeights, position: PipelinePosition, module: nn.Module, **settings: Any) -> AbstractStageWeights:
    """The weights of a stage; `settings` are further arguments of `AbstractStageWeights`."""
    if policy.backward != "same":
        return Slots(policy, position, module, **settings)
    return (Foreseen if policy.predictor else Kept)(policy, position, module, **settings)
