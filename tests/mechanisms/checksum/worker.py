from collections.abc import Mapping
from dataclasses import replace

import torch

from gpp.capture.stage import BoundaryTensor
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnAction, OwnDevice
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import Boundary, Layout
from gpp.runtime.worker.stage import Span, StageRunner

SUM = Layout(("sum",), (BoundaryTensor(shape=(1,), batch_dim=0, dtype=torch.float64, differentiable=False),), whole=True)


class Sums(Hooks):
    def __init__(self, own: OwnDevice) -> None:
        self.own, self.mailboxes, self.total = own, dict[int, Mailbox](), 0.0

    def boundary(self, stage: int, found: Boundary) -> Boundary:
        others = {0: SUM} if stage else dict.fromkeys(range(1, len(self.own.job.plan.stages)), SUM)
        return replace(found, added={**found.added, "K": others})

    def attach(self, runners: Mapping[int, StageRunner]) -> None:
        self.mailboxes.update({s: runner.mailbox for s, runner in runners.items()})

    def runs(self) -> Mapping[str, OwnAction]:
        return {"K": self._add_up}

    def _add_up(self, stage: int, minibatch: int) -> Span:
        start, mailbox = self.own.clock.now(), self.mailboxes[stage]
        own = torch.zeros(1, dtype=torch.float64)
        for param in self.own.params[stage].values():
            own += param.grad.double().sum() if param.grad is not None else 0.0
        if stage:
            mailbox.put("K", minibatch, 0, {"sum": own})
        else:
            self.total = own.item() + sum(tensor.item() for _, tensor in mailbox.take("K", minibatch))
        return start, self.own.clock.now()

    def told(self) -> Mapping[str, float]:
        return {"gradient_sum": self.total} if 0 in self.own.modules else {}


class Worker(AbstractWorkerPart):
    def build(self, own: OwnDevice) -> Hooks:
        return Sums(own)


WORKER = Worker()
