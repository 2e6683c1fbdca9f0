"""The part of mechanisms on a worker: actions of their own kinds, and what comes before and after an update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from gpp.capture.cut import AbstractShards
from gpp.capture.stage import StageModule
from gpp.mechanism import parts
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.around import AbstractStageWeights, AbstractSums
from gpp.runtime.worker.mailbox import Handover, Mailbox
from gpp.runtime.worker.messages import Boundary
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.stage import Span, StageRunner
from gpp.stage import Stage
from gpp.weights.base import AbstractWeights

OwnAction = Callable[[int, int], Span | None]
"""Function that runs an action of a stage and a micro-batch, whose messages have arrived; its span, None for no event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice(Seat):
    """The device of a worker, as mechanisms see it.

    Args:
        modules: stage -> its module, for the stages of the device.
        params: stage -> its parameters by full name, whose gradients an update finds; passes may use other versions of them.
        handover: tensors between stages of the device.
    """

    job: Job
    modules: Mapping[int, StageModule]
    params: Mapping[int, Mapping[str, torch.nn.Parameter]]
    handover: Handover

    @classmethod
    def at(cls, seat: Seat, **others: Any) -> OwnDevice:
        """That of a seat; `others` are the fields that a seat has not."""
        return cls(**{each.name: getattr(seat, each.name) for each in fields(Seat)}, **others)


class Hooks:
    """One mechanism on one worker. Every method does nothing unless a mechanism's own class says otherwise."""

    notes: tuple[str, ...] = ()
    """What a user is to be told before the first step."""
    omits: bool = False
    """Whether the update is left out for which the norm was `measured` last."""

    def boundary(self, stage: int, found: Boundary) -> Boundary:
        """The boundary of a stage of the device, with the layouts of the mechanism's messages, and its form of other ones."""
        return found

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        """Take what runs the device's stages, before the first step and when the hooks of all mechanisms are built:
        `StageRunner.around` is the mechanism's to set."""
        return None

    def mailboxes_of_others(self) -> Mapping[int, Mailbox]:
        """Stage of other devices -> the messages that this device exchanges for it."""
        return {}

    def params_of_others(self) -> Mapping[int, Mapping[str, torch.nn.Parameter]]:
        """Stage of other devices -> parameters by full name whose gradients this device makes."""
        return {}

    def runs(self) -> Mapping[str, OwnAction]:
        """Kind -> how the device runs actions of that kind."""
        return {}

    def after_updates(self) -> None:
        """Do what belongs behind the updates of all stages of the device, in a pipeline that drains."""
        return None

    def sums(self) -> AbstractSums | None:
        """How gradient groups are summed where each of their devices updates a part of the weights; None: all devices have all
        sums."""
        return None

    def measured(self, norm: torch.Tensor, params: Collection[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients as it counts, before the update clips by it.

        Args:
            norm: of the sums in `params`, the parameters of the device, whose gradients may be changed in place.
        """
        return norm

    def kept(self) -> Mapping[str, torch.Tensor]:
        """What checkpoints hold beside weights and states, by a name that no weight has: all devices have the same."""
        return {}

    def told(self) -> Mapping[str, float]:
        """Numbers of the step that is over, for metrics.jsonl and the trackers; each is asked for once."""
        return {}


class AbstractWorkerPart:
    """The part of a mechanism on workers: nothing, unless its own class says otherwise."""

    def shards(
        self, job: Job, stage: Stage, device_id: int, transport: AbstractTransport, status: AbstractStatus
    ) -> AbstractShards | None:
        """What a device has of a stage whose replicas are several devices; None: not this mechanism's.

        Args:
            status: is told when the device waits for the others.
        """
        return None

    def weights(
        self,
        policy: Any,
        plan: Plan,
        modules: Mapping[int, StageModule],
        optimizers: Mapping[int, torch.optim.Optimizer],
        specs: Mapping[int, AbstractOptimizer],
        *,
        rate: Callable[[int], float],
        saved_at: Callable[[int], bool],
    ) -> dict[int, AbstractStageWeights]:
        """The weights of each of a device's stages that trains something, under a policy of the mechanism; none: they are plain.

        Args:
            optimizers, specs: by stage, and their settings.
            rate: number of an update -> its learning rate.
            saved_at: whether a checkpoint is made after so many updates, with the pipeline full.
        """
        return {}

    def build(self, own: OwnDevice) -> Hooks | None:
        """The hooks of a device; None where it has nothing to do."""
        return None


def part_of(policy: AbstractWeights) -> AbstractWorkerPart:
    """The part of the mechanism that has the weights of a policy; one that does nothing where they are plain."""
    return next(iter(parts((policy.mechanism,), "worker", "WORKER", AbstractWorkerPart)), AbstractWorkerPart())


def build_hooks(own: OwnDevice) -> tuple[Hooks, ...]:
    """The hooks of a job's mechanisms: none where its passes are plain, whose steps then have no more to do."""
    built = (part.build(own) for part in parts(own.job.mechanisms, "worker", "WORKER", AbstractWorkerPart))
    return tuple(hooks for hooks in built if hooks is not None)
