"""An optimizer of torch's kind as plain values: its class, and the settings of each group of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Self, final

import torch

from gpp.errors import InvalidConfig
from gpp.optimizers import AbstractOptimizer, told
from gpp.settings import NotNegative, Share

RATE_SHARE = "rate_share"
"""Key of a parameter group: its learning rate over that of the optimizer; 1 where there is none."""


def base_rate(groups: Sequence[Group]) -> float:
    """The learning rate by which those of groups are told: the largest; 1 where all are 0, as when a warm-up begins."""
    return max(float(group.values["lr"]) for group in groups) or 1.0


@cache
def taken_by(cls: type[torch.optim.Optimizer]) -> frozenset[str]:
    """Names of the settings that a class is made with."""
    return frozenset(inspect.signature(cls.__init__).parameters) - {"self", "params"}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let an optimizer's next step have a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_SHARE, 1.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters of a torch optimizer with settings of their own.

    Args:
        names: their full names.
        values: the optimizer's settings by name, and what else the group was given (a class may read it), as JSON values.
        share: of the bytes of all trained parameters.
    """

    names: tuple[str, ...]
    values: dict[str, Any]
    share: Share = 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer(AbstractOptimizer):
    """Any optimizer of torch's kind that updates each parameter from its own gradient; `gpp.app.optimizer_factory` makes it.

    Args:
        path: dotted path of its class.
        groups: all trained parameters.
        state: bytes of state for each byte of trained parameter.
        update: `update_factors`.
        whole: whether it looks at a whole parameter to update any of its numbers, as Adafactor does.

    `weight_decay` stays 0, because the class decays weights itself.
    """

    path: str
    groups: tuple[Group, ...]
    state: NotNegative
    update: tuple[NotNegative, NotNegative] = (0.0, 0.0)
    whole: bool = False

    @property
    def name(self) -> str:
        return self.path

    @property
    def kind(self) -> str:
        return "; ".join(f"{told(self.path, part._defaults())} {share:.0%}" for share, part in self.parts)

    @property
    def parts(self) -> tuple[tuple[float, TorchOptimizer], ...]:
        alike: dict[str, tuple[float, TorchOptimizer]] = {}
        for group in self.groups:
            part = replace(self, groups=(group,))
            share, first = alike.get(name := told(self.path, part._defaults()), (0.0, part))
            alike[name] = share + group.share, first
        return tuple(alike.values())

    @property
    def momentum_factor(self) -> float:
        return 0.0

    def with_momentum(self, factor: float) -> Self:
        raise InvalidConfig("optimizer", self.path, "has no momentum that a policy for the weights may set", "use gpp.NAdam")

    @property
    def state_factor(self) -> float:
        return self.state

    @property
    def update_factors(self) -> tuple[float, float]:
        return self.update

    @property
    def elementwise(self) -> bool:
        return not self.whole

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer with the settings of the first group: for times and bytes, which are asked of each of `parts`."""
        return self._class()(list(params), **self._defaults())

    def build_named(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        own = dict(params)
        if others := set(own) - {name for group in self.groups for name in group.names}:
            raise InvalidConfig("optimizer", self.path, f"has no group for {min(others)}", "give it all trained parameters")
        made = [
            {**group.values, "params": found, RATE_SHARE: group.values["lr"] / self.lr}
            for group in self.groups
            if (found := [own[name] for name in group.names if name in own])
        ]
        return self._class()(made, **self._defaults())

    def _defaults(self) -> dict[str, Any]:
        """The settings of the first group that the class is made with."""
        takes = taken_by(self._class())
        return {name: value for name, value in self.groups[0].values.items() if name in takes}

    def following(self, values: Sequence[Mapping[str, Any]]) -> Self:
        """The same with other settings of its groups, in their order."""
        groups = tuple(replace(group, values=dict(new)) for group, new in zip(self.groups, values, strict=True))
        return replace(self, lr=base_rate(groups), groups=groups)

    def settle(self, made: torch.optim.Optimizer, params: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Give an optimizer that `build_named` has made of the same parameters these settings."""
        for held, group in zip(made.param_groups, self.build_named(params).param_groups, strict=True):
            held.update({name: value for name, value in group.items() if name != "params"})

    def _class(self) -> type[torch.optim.Optimizer]:
        module, _, name = self.path.rpartition(".")
        return getattr(import_module(module), name)
