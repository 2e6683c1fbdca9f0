"""Weights of a stage whose replicas share the optimizer's state: each replica hands out those that it has updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from gpp.program.program import ReduceGroup
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.sharded_state import Shares
from gpp.runtime.transport.channels import AbstractTransport


def in_parts(tensors: Mapping[str, torch.Tensor], parts: Sequence[Sequence[str]], flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of a flat tensor [elements], one for each part. In it the part's tensors lie one behind the other.

    Args:
        tensors: by name, all that `parts` name.
        flat: as many elements as they have together.
    """
    return list(flat.split([sum(tensors[name].numel() for name in part) for part in parts]))


@final
class Handout:
    """The weights of the device's stages in flat memory, part by part, so that nothing is packed.

    Args:
        params: the device's parameters by full name; their memory moves.
        groups: of `gpp.program.program.reduce_groups`.
        status: is told when the device waits for the other replicas.
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        shares: Shares,
        groups: Sequence[ReduceGroup],
        *,
        device_id: int,
        transport: AbstractTransport,
        status: AbstractStatus,
    ) -> None:
        self._transport, self._status = transport, status
        self._parts: list[tuple[int, list[torch.Tensor], int]] = []
        for g, group in enumerate(groups):
            dealt = shares.parts(g)
            if dealt is None or device_id not in group.devices:
                continue
            names = [name for part in dealt for name in part]
            flat, at = torch.cat([params[name].detach().reshape(-1) for name in names]), 0
            for name in names:
                params[name].data = flat[at : at + params[name].numel()].view_as(params[name])
                at += params[name].numel()
            self._parts.append((g, in_parts(params, dealt, flat), group.devices.index(device_id)))

    def __call__(self) -> None:
        """Hand the weights out after the update, so that all replicas have all of them again."""
        for group, parts, own in self._parts:
            self._status.waiting(True)
            self._transport.hand_out(group, parts, own).wait()
            self._status.waiting(False)
