"""What mechanisms do on a worker: actions of their own kinds, and what comes before and after an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpp.capture.stage import StageModule
from gpp.mechanism import found
from gpp.program.kinds import Direction
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import Mark
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from gpp.runtime.worker.stage import Span

OwnAction = Callable[[int, int], Span | None]
"""Function that runs an action of a stage and a micro-batch, whose messages have arrived; its span, None for no event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """The device of a worker, as mechanisms see it.

    Args:
        modules: stage -> its module, for the stages of the device.
        params: stage -> its parameters by full name, whose gradients an update finds; passes may use other versions of them.
        now: gives the marks at which a pass begins and ends.
    """

    job: Job
    device_id: int
    device: torch.device
    modules: Mapping[int, StageModule]
    params: Mapping[int, Mapping[str, torch.nn.Parameter]]
    now: Callable[[], Mark]


class Hooks:
    """One mechanism on one worker. Every method does nothing unless a mechanism's own class says otherwise."""

    def layouts(self, stage: int) -> Mapping[Direction, Mapping[int, Layout]]:
        """Direction -> other stage -> the tensors of the messages that a stage of the device exchanges with it."""
        return {}

    def connect(self, mailboxes: Mapping[int, Mailbox]) -> None:
        """Take the mailboxes of the device's stages, before the first step."""
        return None

    def runs(self) -> Mapping[str, OwnAction]:
        """Kind -> how the device runs actions of that kind."""
        return {}

    def before_update(self, stage: int, minibatch: int) -> None:
        """Do what belongs between the last backward of a mini-batch and its update, when the sums are over."""
        return None

    def told(self) -> Mapping[str, float]:
        """Numbers of the step that is over, for metrics.jsonl and the trackers; each is asked for once."""
        return {}


class AbstractWorkerPart(ABC):
    """What a mechanism does on workers."""

    @abstractmethod
    def build(self, own: OwnDevice) -> Hooks | None:
        """The hooks of a device; None where it has nothing to do."""


def build_hooks(own: OwnDevice) -> tuple[Hooks, ...]:
    """The hooks of the mechanisms that a plan's stages have: none where the plan is plain, whose steps then have no more to do."""
    names = {value.name for stage in own.job.plan.stages for value in stage.mechanisms}
    parts = found("worker", "WORKER", AbstractWorkerPart) if names else {}
    built = (part.build(own) for name, part in parts.items() if name in names)
    return tuple(hooks for hooks in built if hooks is not None)


def with_added(boundary: Boundary, hooks: Sequence[Hooks], stage: int) -> Boundary:
    """The boundary of a stage, with the messages of mechanisms."""
    added = dict(boundary.helping)
    for each in hooks:
        for direction, layouts in each.layouts(stage).items():
            added[direction] = {**added.get(direction, {}), **layouts}
    return replace(boundary, helping=added) if hooks else boundary
