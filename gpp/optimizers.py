"""Optimizers and learning-rate schedules as plain values; torch is imported only where they are built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, final

from pydantic import Field

from gpp.settings import Decay, Natural, NotNegative, Share, settings

if TYPE_CHECKING:
    import torch


@final
@settings("optimizer.learning_rate")
class LearningRate:
    """Linear warm-up to the base rate, then constant, linear or cosine decay to `final_fraction` of it."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    final_fraction: Share = 0.0

    def factor(self, step: int, num_steps: int) -> float:
        """Multiplier of the base rate at `step` (0-based) of a run of `num_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        fall = done if self.shape == "linear" else (1 - math.cos(math.pi * min(done, 1.0))) / 2
        return 1.0 - (1.0 - self.final_fraction) * min(fall, 1.0)


Rate = Annotated[float, Field(gt=0, examples=[0.01])]
ClipNorm = Annotated[float, Field(gt=0, examples=[1.0])]
ClipScope = Literal["model", "stage"]
Shard = Literal["none", "replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundSteps:
    """What the pipeline does around the steps of an optimizer, whichever it is.

    Args:
        learning_rate: multiplies the optimizer's own rate, step by step.
        clip_norm: the largest norm of gradients: larger ones are scaled down to it, and None leaves them as they are.
        clip_scope: whether that is the norm of the whole `model`, over all stages, or of each `stage`, for which the devices need
            not meet.
        log_gradient_norm: whether the norm of the whole model's gradient is logged every step, for which the devices meet; where
            they clip by it, it is logged in any case.
        shard: with `replicas` each replica of a stage keeps the state of a part of the stage's parameters, updates these, and
            hands them to the others (ZeRO's first stage, arXiv 1910.02054).
    """

    learning_rate: LearningRate = field(default_factory=LearningRate)
    clip_norm: ClipNorm | None = None
    clip_scope: ClipScope = "model"
    log_gradient_norm: bool = False
    shard: Shard = "none"


def told(name: str, settings: Mapping[str, Any]) -> str:
    """A name and the settings that are on. Any number but 0 takes the same time as any other, and no rate matters."""
    on = {key: value for key, value in settings.items() if value and key != "lr"}
    return " ".join([name, *(f"{key}={value}" if isinstance(value, str) else key for key, value in on.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractOptimizer(AroundSteps, ABC):
    """An optimizer's settings."""

    lr: Rate
    weight_decay: NotNegative = 0.0

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def kind(self) -> str:
        """What it is called where times measured with it are kept: with all settings by which a step may take another time."""
        around = {field.name for field in fields(AroundSteps)}
        return told(self.name, {own.name: getattr(self, own.name) for own in fields(self) if own.name not in around})

    @property
    def parts(self) -> tuple[tuple[float, AbstractOptimizer], ...]:
        """Optimizers of parameters that are updated in ways of their own, each with its share of the trained parameters' bytes."""
        return ((1.0, self),)

    @property
    def norm_for(self) -> tuple[str, object, str] | None:
        """The first setting for which an update needs the norm of all gradients (to clip by it, or to log it), its value, and what
        to set instead; None if nothing does."""
        if self.clips_model:
            return "optimizer.clip_scope", "model", "set optimizer.clip_scope=stage to clip each stage by its own norm"
        if self.log_gradient_norm:
            return "optimizer.log_gradient_norm", True, "set optimizer.log_gradient_norm=false"
        return None

    @property
    def clips_model(self) -> bool:
        """Whether gradients are clipped by the norm over all stages."""
        return self.clip_norm is not None and self.clip_scope == "model"

    @property
    @abstractmethod
    def momentum_factor(self) -> float:
        """The share of the past in the direction of a step; 0 for none."""

    @abstractmethod
    def with_momentum(self, factor: float) -> Self:
        """The same with another `momentum_factor`."""

    @property
    @abstractmethod
    def state_factor(self) -> float:
        """Bytes of state for each byte of trainable parameter."""

    @property
    def update_factors(self) -> tuple[float, float]:
        """Bytes that a step takes for itself: for each byte of all trainable parameters together, and for each of the largest one.

        Torch's fused forms take none.
        """
        return 0.0, 0.0

    @property
    def elementwise(self) -> bool:
        """Whether a part of a parameter takes the steps that it takes in the whole: each number follows from its own gradients."""
        return True

    @abstractmethod
    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The torch optimizer over `params`, in its fused form (one kernel for all, on CPU too) where torch has one."""

    def build_named(self, params: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The same over parameters with their full names, by which their settings may differ."""
        return self.build(param for _, param in params)


def _of_torch(
    name: str, optimizer: AbstractOptimizer, params: Iterable[torch.nn.Parameter], **settings: Any
) -> torch.optim.Optimizer:
    """The class of `torch.optim` of that name, with settings beside the rate and the weight decay."""
    import torch

    return getattr(torch.optim, name)(params, lr=optimizer.lr, weight_decay=optimizer.weight_decay, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractMomentum(AbstractOptimizer):
    """Optimizers that add up gradients of the past, each step with `momentum` times as much of them; 0 for none."""

    momentum: Decay = 0.0

    @property
    def momentum_factor(self) -> float:
        return self.momentum

    def with_momentum(self, factor: float) -> Self:
        return replace(self, momentum=factor)


@final
@settings("optimizer")
class SGD(AbstractMomentum):
    """Stochastic gradient descent, with momentum if it is above 0."""

    @property
    def state_factor(self) -> float:
        return 1.0 if self.momentum else 0.0

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return _of_torch("SGD", self, params, momentum=self.momentum, fused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractAdam(AbstractOptimizer):
    """Optimizers that keep a mean of gradients and one of their squares; with `decoupled` the weight decay is AdamW's."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    decoupled: bool = False

    @property
    def momentum_factor(self) -> float:
        return self.betas[0]

    def with_momentum(self, factor: float) -> Self:
        return replace(self, betas=(factor, self.betas[1]))

    @property
    def state_factor(self) -> float:
        return 2.0


@final
@settings("optimizer")
class Adam(AbstractAdam):
    """Adam and AdamW."""

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return _of_torch("AdamW" if self.decoupled else "Adam", self, params, betas=self.betas, eps=self.eps, fused=True)


@final
@settings("optimizer")
class RMSprop(AbstractMomentum):
    """RMSprop, with momentum if it is above 0."""

    alpha: Decay = 0.99
    eps: NotNegative = 1e-8

    @property
    def state_factor(self) -> float:
        return 2.0 if self.momentum else 1.0

    @property
    def update_factors(self) -> tuple[float, float]:
        return 1.0 + bool(self.weight_decay), 0.0

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        own = {"alpha": self.alpha, "eps": self.eps, "momentum": self.momentum}
        return _of_torch("RMSprop", self, params, **own, foreach=True)  # torch has no fused form


@final
@settings("optimizer")
class NAdam(AbstractAdam):
    """Adam with Nesterov's momentum (Dozat, 2016), whose first factor grows from half of `betas[0]`."""

    momentum_decay: NotNegative = 0.004

    @property
    def update_factors(self) -> tuple[float, float]:
        return 1.0 + bool(self.weight_decay and not self.decoupled), 0.0

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        own = {"momentum_decay": self.momentum_decay, "decoupled_weight_decay": self.decoupled}
        return _of_torch("NAdam", self, params, betas=self.betas, eps=self.eps, **own, foreach=True)  # torch has no fused form


@final
@settings("optimizer")
class Muon(AbstractMomentum):
    """Muon (Jordan et al., 2024) for matrices: the momentum with its singular values made equal; AdamW for all else.

    An embedding and a classifier are matrices too. `weight_decay` is decoupled, for both.

    Args:
        adjust: `original`: steps of matrices with more rows than columns are larger; `match_rms_adamw`: steps as large as AdamW's,
            so that its rates fit (Moonlight, arXiv 2502.16982).
        betas: of AdamW.
        eps: of AdamW.
    """

    momentum: Decay = 0.95
    nesterov: bool = True
    adjust: Literal["original", "match_rms_adamw"] = "original"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 0.1

    @property
    def state_factor(self) -> float:
        """Of matrices, which are nearly all; AdamW keeps 2."""
        return 1.0

    @property
    def update_factors(self) -> tuple[float, float]:
        """Of square matrices, one after the other; others take less."""
        return 0.0, 3.0

    @property
    def elementwise(self) -> bool:
        return False

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from gpp.joint_optimizer import joint

        every = list(params)
        matrices, rest = [p for p in every if p.ndim == 2], [p for p in every if p.ndim != 2]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            own = {"momentum": self.momentum, "nesterov": self.nesterov, "adjust_lr_fn": self.adjust}
            parts.append(_of_torch("Muon", self, matrices, **own))
        if rest:
            parts.append(_of_torch("AdamW", self, rest, betas=self.betas, eps=self.eps, fused=True))
        return joint(parts)
