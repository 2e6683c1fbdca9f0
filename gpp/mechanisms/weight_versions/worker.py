"""The weights of stages on a worker, under a policy with versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpp.capture.stage import StageModule
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.on_worker.kept import Foreseen, KeptVersions
from gpp.mechanisms.weight_versions.on_worker.slots import Slots
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.runtime.worker.around import AbstractStageWeights
from gpp.runtime.worker.hooks import AbstractWorkerPart


class VersionsWorkerPart(AbstractWorkerPart):
    """What the backwards of a policy use decides what is kept."""

    def weights(
        self,
        policy: AbstractVersionPolicy,
        plan: Plan,
        modules: Mapping[int, StageModule],
        optimizers: Mapping[int, torch.optim.Optimizer],
        specs: Mapping[int, AbstractOptimizer],
        **settings: Any,
    ) -> dict[int, AbstractStageWeights]:
        kind = Slots if not policy.same else Foreseen if policy.predictor else KeptVersions
        return {
            s: kind(policy, plan.position(s), modules[s], optimizer=optimizer, spec=specs[s], **settings)
            for s, optimizer in optimizers.items()
        }


WORKER = VersionsWorkerPart()
