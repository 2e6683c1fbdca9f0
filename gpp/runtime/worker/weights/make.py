"""Choice of the class that carries a weight policy out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.runtime.worker.weights.base import AbstractStageWeights
from gpp.runtime.worker.weights.foreseen import Foreseen
from gpp.runtime.worker.weights.kept import KeptVersions
from gpp.runtime.worker.weights.slots import Slots
from gpp.weights.base import AbstractWeights, PipelinePosition


def stage_weights(policy: AbstractWeights, position: PipelinePosition, module: nn.Module, **settings: Any) -> AbstractStageWeights:
    """The weights of a stage; `settings` are further arguments of `AbstractStageWeights`."""
    if policy.backward != "same":
        return Slots(policy, position, module, **settings)
    return (Foreseen if policy.predictor else KeptVersions)(policy, position, module, **settings)


def device_weights(
    policy: AbstractWeights | None,
    plan: Plan,
    modules: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    specs: Mapping[int, AbstractOptimizer],
    **settings: Any,
) -> dict[int, AbstractStageWeights]:
    """The weights of each of a device's stages that trains something; none under a policy that flushes (None).

    Args:
        optimizers, specs: by stage, and their settings.
        settings: further arguments of `AbstractStageWeights`.
    """
    if policy is None:
        return {}
    return {
        s: stage_weights(policy, plan.position(s), modules[s], optimizer=optimizer, spec=specs[s], **settings)
        for s, optimizer in optimizers.items()
    }
