"""What marks do on a worker: around the passes of their stages, and the copies to the host and back."""

from __future__ import annotations

from collections.abc import Mapping

from gpp.mechanisms.marks.host import CardCopies, HostCopies
from gpp.mechanisms.marks.keeper import Keeper
from gpp.mechanisms.marks.kinds import COPY_IN, COPY_OUT
from gpp.mechanisms.marks.nodes import NodeMarks
from gpp.mechanisms.marks.stage import marks_of
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnAction, OwnDevice
from gpp.runtime.worker.seat import generators
from gpp.runtime.worker.stage import StageRunner


class Keepers(Hooks):
    """The stages of a device that have marks."""

    def __init__(self, own: OwnDevice) -> None:
        self._own, self._keepers = own, dict[int, Keeper]()

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        own, job = self._own, self._own.job
        marked = {s: stage for s in runners if (stage := job.plan.stages[s]).spares}
        moves = any(marks_of(stage).offload for stage in marked.values())
        copies = (CardCopies(own.card) if own.card else HostCopies(own.clock.now)) if moves else None
        for s, stage in marked.items():
            module = own.modules[s]
            runners[s].around = self._keepers[s] = Keeper(
                module,
                NodeMarks.of(job.captured, job.graph, stage, module.calls),
                generators=generators(own.device) if module.has_random else (),
                copies=copies,
            )

    def runs(self) -> Mapping[str, OwnAction]:
        keepers = self._keepers
        return {COPY_OUT: lambda stage, mb: keepers[stage].copy_out(mb), COPY_IN: lambda stage, mb: keepers[stage].fetch(mb)}


class MarksWorkerPart(AbstractWorkerPart):
    """Marks are nothing to a device whose own stages have none."""

    def build(self, own: OwnDevice) -> Hooks | None:
        return Keepers(own) if any(own.job.plan.stages[s].spares for s in own.modules) else None


WORKER = MarksWorkerPart()
