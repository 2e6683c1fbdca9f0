"""Optimizers and learning-rate schedules as plain values; torch is imported only where they are built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from gpp.errors import InvalidConfig

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up to the base rate, then constant, linear or cosine decay to `final_fraction` of it."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in ("constant", "linear", "cosine"):
            raise InvalidConfig("optimizer.learning_rate.shape", self.shape, "must be constant, linear or cosine", "use cosine")
        if self.warmup_steps < 0 or not 0 <= self.final_fraction <= 1:
            raise InvalidConfig(
                "optimizer.learning_rate",
                f"{self.warmup_steps}, {self.final_fraction}",
                "warmup_steps must be at least 0 and final_fraction in [0, 1]",
                "correct them",
            )

    def factor(self, step: int, num_steps: int) -> float:
        """Multiplier of the base rate at `step` (0-based) of a run of `num_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        fall = done if self.shape == "linear" else (1 - math.cos(math.pi * min(done, 1.0))) / 2
        return 1.0 - (1.0 - self.final_fraction) * min(fall, 1.0)


class AbstractOptimizer(ABC):
    """An optimizer's settings.

    `clip_norm`: the largest norm of gradients; larger ones are scaled down to it. None: as they are. `clip_scope`: whose norm: that
    of the whole `model`, over all stages, or of each `stage`, which needs no meeting of all devices.
    """

    lr: float
    learning_rate: LearningRate
    clip_norm: float | None
    clip_scope: str

    @property
    def clips_model(self) -> bool:
        """Whether all devices meet before the update, to clip by the norm over all stages."""
        return self.clip_norm is not None and self.clip_scope == "model"

    @property
    @abstractmethod
    def keeps_direction(self) -> bool:
        """Whether its state tells where the last step went, as a prediction of the weights needs it."""

    @property
    @abstractmethod
    def prediction_traffic(self) -> float:
        """Bytes moved through memory to extrapolate a byte of weights (`gpp.runtime.worker.weights.prediction`)."""

    @property
    @abstractmethod
    def state_factor(self) -> float:
        """Bytes of state for each byte of trainable parameter."""

    @abstractmethod
    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `params`, in its fused form where torch has one: one kernel for all of them, on CPU too."""


CLIP_SCOPES = ("model", "stage")


def _check(lr: float, weight_decay: float, clip_norm: float | None, clip_scope: str) -> None:
    if not isinstance(lr, (int, float)) or not lr > 0:
        raise InvalidConfig("optimizer.lr", lr, "must be a positive number", "set optimizer.lr=0.01")
    if not weight_decay >= 0:
        raise InvalidConfig("optimizer.weight_decay", weight_decay, "must be at least 0", "set optimizer.weight_decay=0")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise InvalidConfig("optimizer.clip_norm", clip_norm, "must be a positive number, or null", "set optimizer.clip_norm=1.0")
    if clip_scope not in CLIP_SCOPES:
        rule = f"must be one of {', '.join(CLIP_SCOPES)}"
        raise InvalidConfig("optimizer.clip_scope", clip_scope, rule, "set optimizer.clip_scope=model")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(AbstractOptimizer):
    """Stochastic gradient descent, with momentum if it is above 0."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    learning_rate: LearningRate = LearningRate()
    clip_norm: float | None = None
    clip_scope: str = "model"

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.clip_norm, self.clip_scope)
        if not 0 <= self.momentum < 1:
            raise InvalidConfig("optimizer.momentum", self.momentum, "must be in [0, 1)", "set optimizer.momentum=0.9")

    @property
    def state_factor(self) -> float:
        return 1.0 if self.momentum else 0.0

    @property
    def keeps_direction(self) -> bool:
        return self.momentum > 0

    @property
    def prediction_traffic(self) -> float:
        return 3.0  # weights and momentum read, prediction written

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(AbstractOptimizer):
    """Adam; with `decoupled` the weight decay is AdamW's."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    learning_rate: LearningRate = LearningRate()
    clip_norm: float | None = None
    clip_scope: str = "model"

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.clip_norm, self.clip_scope)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidConfig("optimizer.betas", self.betas, "must be two numbers in [0, 1)", "set optimizer.betas=[0.9,0.999]")

    @property
    def state_factor(self) -> float:
        return 2.0

    @property
    def keeps_direction(self) -> bool:
        return True

    @property
    def prediction_traffic(self) -> float:
        return 9.0  # the root of the second moment into scratch, scaled and shifted there, then weights, mean and scratch into one

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        first, second = self.betas
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(params, lr=self.lr, betas=(first, second), eps=self.eps, weight_decay=self.weight_decay, fused=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RMSprop(AbstractOptimizer):
    """RMSprop, with momentum if it is above 0."""

    lr: float
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    learning_rate: LearningRate = LearningRate()
    clip_norm: float | None = None
    clip_scope: str = "model"

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.clip_norm, self.clip_scope)
        for name, usual in (("alpha", 0.99), ("momentum", 0.9)):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidConfig(f"optimizer.{name}", getattr(self, name), "must be in [0, 1)", f"set optimizer.{name}={usual}")

    @property
    def state_factor(self) -> float:
        return 2.0 if self.momentum else 1.0

    @property
    def keeps_direction(self) -> bool:
        return self.momentum > 0

    @property
    def prediction_traffic(self) -> float:
        return 3.0  # weights and the last direction read, prediction written

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.RMSprop(
            params,
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            foreach=True,  # torch has no fused one
        )
