"""The gradients of one device's parameters: sums over replicas and tied weights, some of which overlap with the backward that
completes them, and the global norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpp.program.program import ReduceGroup
from gpp.program.waits import EVERYONE
from gpp.runtime.engine import GRADIENT_NORM
from gpp.runtime.transport.channels import Handle
from gpp.runtime.worker.hooks import Hooks
from gpp.runtime.worker.seat import Seat

BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed at once, about: as many as DistributedDataParallel sums."""


@final
class Buckets:
    """Parts of one buffer of gradients, each summed as soon as autograd has added to all of its parameters.

    All members of a group have the same parts and begin their sums in the same order, the last part first: a backward
    comes to the last parameters first.

    Args:
        params: the parameters whose gradients lie in the buffer, in its order.
        begin: starts the sum of a part of the buffer.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], flat: torch.Tensor, begin: Callable[[torch.Tensor], None], num_bytes: int
    ) -> None:
        self._begin = begin
        self._parts: list[torch.Tensor] = []
        self._sizes: list[int] = []
        end = at = flat.numel()
        members = 0
        for param in reversed(params):
            param.register_post_accumulate_grad_hook(partial(self._added, len(self._parts)))
            at, members = at - param.numel(), members + 1
            if not at or (end - at) * flat.element_size() >= num_bytes:
                self._parts.append(flat[at:end])
                self._sizes.append(members)
                end, members = at, 0
        self._missing: list[int] = []
        self._next = 0

    def arm(self) -> None:
        """Announce that the next backward is the last that adds to these gradients."""
        self._missing, self._next = list(self._sizes), 0

    def finish(self) -> None:
        """Begin the sums that are left: of parameters to which the backward has not added."""
        for part in self._parts[self._next :]:
            self._begin(part)
        self._missing, self._next = [], 0

    def _added(self, part: int, param: torch.Tensor) -> None:
        if self._missing:
            self._missing[part] -= 1
            while self._next < len(self._parts) and not self._missing[self._next]:
                self._begin(self._parts[self._next])
                self._next += 1


class Gradients:
    """Holds the gradients that are summed with other devices in one contiguous buffer a group.

    Args:
        params: the device's parameters by full name.
        groups: those groups of `gpp.program.program.reduce_groups` that this device is in.
        clip_norm: largest norm of all gradients of the model; None where the norm alone is asked for, or nothing.
        counts: whether this device counts a parameter in the norm, if it is the first of those that sum its gradient.
        hooks: of the mechanisms, which may leave a part of the sums to each device, and have a say in the norm.
        bucket_bytes: sizes of the parts in which a backward that is armed has its gradients summed; None: at once, and
            not before `reduce`.
    """

    def __init__(
        self,
        seat: Seat,
        params: Mapping[str, torch.nn.Parameter],
        groups: Sequence[ReduceGroup],
        *,
        clip_norm: float | None,
        counts: Callable[[str], bool] = lambda name: True,
        hooks: Sequence[Hooks] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self.transport, self.clip_norm, self._hooks = seat.transport, clip_norm, hooks
        self.omits, self._device, device_id = False, seat.device, seat.device_id
        self.params = {name: param for name, param in params.items() if param.requires_grad}
        self.norm: torch.Tensor | None = None
        self._groups = {g: group for g, group in enumerate(groups) if device_id in group.devices}
        # A sum that several devices hold counts once in the norm: at the first of them.
        elsewhere = {name for group in self._groups.values() if group.devices[0] != device_id for name in group.params}
        self._counted = [name for name in self.params if name not in elsewhere and counts(name)]
        self._flat: dict[int, torch.Tensor] = {}
        self._buckets: dict[int, Buckets] = {}
        sums = self._rule = next((sums for each in hooks if (sums := each.sums())), None)
        self._start = sums.begin if sums else seat.transport.reduce
        for g, group in self._groups.items():
            own = [self.params[name] for name in (sums.order(g) if sums else group.params)]
            flat = self._flat[g] = torch.zeros(sum(p.numel() for p in own), dtype=own[0].dtype, device=own[0].device)
            at = 0
            for param in own:
                # Autograd adds into it in place, so the sum over devices needs no packing.
                param.grad = flat[at : at + param.numel()].view_as(param)
                at += param.numel()
            if bucket_bytes is not None:
                self._buckets[g] = Buckets(own, flat, partial(self._begin, g), bucket_bytes)
        shared = {name for group in self._groups.values() for name in group.params}
        self._sums: list[Handle] = []
        self._own = {name: param for name, param in self.params.items() if name not in shared}

    @property
    def overlaps(self) -> bool:
        """Whether sums begin while a backward still runs."""
        return bool(self._buckets)

    def arm(self, groups: Sequence[int]) -> None:
        """Announce that the next backward is the last that adds to these groups' gradients. Their sums follow it at once."""
        for group in groups:
            self._buckets[group].arm()

    def _begin(self, group: int, part: torch.Tensor) -> None:
        self._sums.append(self._start(group, part))

    def reduce(self, group: int) -> int:
        """Start to sum a group's gradients over its devices; `settle` before they are read.

        Returns:
            Bytes over each member's link in a ring all-reduce.
        """
        flat, n = self._flat[group], len(self._groups[group].devices)
        if group in self._buckets:
            self._buckets[group].finish()
        else:
            self._begin(group, flat)
        return round(flat.numel() * flat.element_size() * 2 * (n - 1) / n)

    def settle(self) -> None:
        """Make sure that later computations see the sums."""
        for handle in self._sums:
            handle.wait()
        self._sums.clear()

    def clip(self) -> int:
        """Take the norm of all gradients, and scale them down to the largest one allowed, if there is one and it is larger.

        Returns the bytes moved.
        `omits` says until the next step whether the update is to be left out.
        As `torch.nn.utils.clip_grad_norm_` on the whole model: the scale is at most clip_norm / (norm + 1e-6).
        """
        self.settle()
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        if self._rule:
            total += self._rule.norm(self._counted).double().square()
        elif grads := [grad for name in self._counted if (grad := self.params[name].grad) is not None]:
            total += get_total_norm(grads).double().square()
        self.transport.reduce(EVERYONE, total).wait()
        norm = total.sqrt()[0]
        for each in self._hooks:
            norm = each.measured(norm, self.params.values())
        self.omits = any(each.omits for each in self._hooks)
        if self.clip_norm is not None:
            clip_grads_with_norm_(self.params.values(), self.clip_norm, norm)
        self.norm = norm
        return total.numel() * total.element_size()

    @property
    def told(self) -> dict[str, float]:
        """The gradients' entries in the record of a step: their norm before it was clipped, where it was taken."""
        return {} if self.norm is None else {GRADIENT_NORM: self.norm.item()}

    def clear(self, names: Collection[str] | None = None) -> None:
        """Forget this step's gradients, after the update.

        Args:
            names: the parameters that are meant; those of a gradient group all or none. None: all.
        """
        for g, flat in self._flat.items():
            if names is None or self._groups[g].params[0] in names:
                flat.zero_()
        for name, param in self._own.items():
            if names is None or name in names:
                param.grad = None
