"""Gradients and weights of a stage whose replicas share the optimizer's state: each replica has the sums of its part of the
gradients alone, and hands out the weights that it has updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from gpp.mechanisms.shared_state.job import dealt
from gpp.program.program import reduce_groups
from gpp.runtime.transport.channels import Handle
from gpp.runtime.worker.around import AbstractSums
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice


def laid_out(params: Mapping[str, torch.nn.Parameter], parts: Sequence[Sequence[str]]) -> Sequence[torch.Tensor]:
    """Parts of one flat memory, each [elements], into which the parameters have moved, one behind the other."""
    names = [name for part in parts for name in part]
    flat, at = torch.cat([params[name].detach().reshape(-1) for name in names]), 0
    for name in names:
        params[name].data = flat[at : at + params[name].numel()].view_as(params[name])
        at += params[name].numel()
    return flat.split([sum(params[name].numel() for name in part) for part in parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroup:
    """One gradient group of a device.

    Args:
        own: number of the device in the group.
        dealt: for each device of the group the parameters that it updates.
        weights: of each device's parameters, [elements]: parts of one memory, so that nothing is packed.
        params: in the group's own order.
    """

    own: int
    dealt: list[list[str]]
    weights: Sequence[torch.Tensor]
    params: tuple[str, ...]


@final
class SharedState(Hooks, AbstractSums):
    """A device's part of the state of stages with replicas; its parameters' memory moves."""

    def __init__(self, own: OwnDevice) -> None:
        self._transport, self._status, self._device, job = own.transport, own.status, own.device, own.job
        self._params = params = {name: param for stage in own.params.values() for name, param in stage.items()}
        self._groups = dict[int, SharedGroup]()
        for g, group in enumerate(reduce_groups(job.plan, job.graph)):
            if own.device_id in group.devices:
                parts = dealt(job.graph, group)
                self._groups[g] = SharedGroup(
                    own=group.devices.index(own.device_id),
                    dealt=parts,
                    weights=laid_out(params, parts),
                    params=group.params,
                )

    def sums(self) -> AbstractSums | None:
        return self if self._groups else None

    def order(self, group: int) -> Sequence[str]:
        return [name for part in self._groups[group].dealt for name in part]

    def begin(self, group: int, flat: torch.Tensor) -> Handle:
        own = self._groups[group]
        return self._transport.scatter(group, flat.split([part.numel() for part in own.weights]), own.own)

    def norm(self, counted: Sequence[str]) -> torch.Tensor:
        # A gradient whose sum another replica has: its norm comes from there, so the norm of all is what it is where every replica
        # has all sums.
        elsewhere = {name for own in self._groups.values() for n, part in enumerate(own.dealt) if n != own.own for name in part}
        found = {
            name: torch.linalg.vector_norm(param.grad)
            for name, param in self._params.items()
            if param.grad is not None and name not in elsewhere
        }
        for g, own in self._groups.items():
            norms = own.weights[0].new_zeros(len(own.params))
            for i, name in enumerate(own.params):
                if name in found:
                    norms[i] = found[name]
            self._transport.reduce(g, norms).wait()
            found |= dict(zip(own.params, norms, strict=True))
        every = [found[name] for name in counted if name in found]
        return torch.linalg.vector_norm(torch.stack(every)) if every else torch.zeros((), device=self._device)

    def after_updates(self) -> None:
        for g, own in self._groups.items():
            self._status.waiting(True)
            self._transport.hand_out(g, own.weights, own.own).wait()
            self._status.waiting(False)


class SharedStateWorkerPart(AbstractWorkerPart):
    """Nothing to do for devices that train nothing."""

    def build(self, own: OwnDevice) -> Hooks | None:
        return SharedState(own) if own.job.settings.course is None else None


WORKER = SharedStateWorkerPart()
