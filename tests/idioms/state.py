"""Buffers, attributes, modes and random numbers."""

from __future__ import annotations

import random
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.idioms.case import D, Made, idiom
from tests.idioms.parameters import Between

on = partial(idiom, theme="State, modes, random numbers")


class Frozen(nn.Module):
    """An encoder without training, and a head."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, D), inside, nn.Tanh()).requires_grad_(False)
        self.encoder.eval()
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@on("a frozen encoder in `eval()`, with dropout", "equal")
def frozen_dropout() -> Made:
    return Made(Frozen(nn.Dropout(0.5)))


@on("a frozen encoder in `eval()`, with batch norm", "equal")
def frozen_norm() -> Made:
    return Made(Frozen(nn.BatchNorm1d(D)))


class Stubborn(Frozen):
    def train(self, mode: bool = True) -> Stubborn:
        super().train(mode)
        self.encoder.eval()
        return self


@on("`train()` overridden so that an encoder stays in `eval()`", "equal")
def stubborn() -> Made:
    return Made(Stubborn(nn.BatchNorm1d(D)))


@on("the whole model left in `eval()`", "equal")
def all_eval() -> Made:
    return Made(Between(nn.Dropout(0.5)).eval())


@on("batch norm", "warned", "updated by every micro-batch", "one micro-batch a mini-batch, or a group norm")
def batch_norm() -> Made:
    return Made(Between(nn.BatchNorm1d(D)))


@on("batch norm, a micro-batch a mini-batch", "equal")
def batch_norm_whole() -> Made:
    return Made(Between(nn.BatchNorm1d(D)), whole=True)


@on("`SyncBatchNorm`", "warned", "updated by every micro-batch", "one micro-batch a mini-batch")
def sync_norm() -> Made:
    return Made(Between(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(D))))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


@on("samples compared in `forward` (`x - x.mean(0)`)", "warned", "by the others of its batch", "one micro-batch a mini-batch")
def centred() -> Made:
    return Made(Between(Centred()))


class Mean(nn.Module):
    """A running mean of its inputs."""

    mean: Tensor

    def __init__(self, form: str, persistent: bool = True) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("mean", torch.zeros(D), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        if self.training:
            now = x.detach().mean(0)
            if self.form == "in place":
                self.mean.mul_(0.9).add_(0.1 * now)
            elif self.form == "copy":
                with torch.no_grad():
                    self.mean.copy_(0.9 * self.mean + 0.1 * now)
            else:
                self.mean = 0.9 * self.mean + 0.1 * now
        return out


@on("a buffer changed in place in `forward`, a micro-batch a mini-batch", "equal")
def buffer_in_place() -> Made:
    return Made(Between(Mean("in place")), whole=True)


@on("a buffer changed in place in `forward`", "warned", "updated by every micro-batch", "one micro-batch a mini-batch")
def buffer_in_pieces() -> Made:
    return Made(Between(Mean("in place")))


@on("`buffer.copy_` under `no_grad`, a micro-batch a mini-batch", "equal")
def buffer_copied() -> Made:
    return Made(Between(Mean("copy")), whole=True)


@on("a buffer assigned anew in `forward`, a micro-batch a mini-batch", "equal")
def buffer_assigned() -> Made:
    model = Between(Mean("assigned"))
    model.again = model.mid  # a second name, for which torch.export calls proxies of all modules
    return Made(model, whole=True)


@on("`register_buffer(persistent=False)`, a micro-batch a mini-batch", "equal")
def passing_buffer() -> Made:
    return Made(Between(Mean("in place", persistent=False)), whole=True)


@on("a buffer shared by two modules", "equal")
def shared_buffer() -> Made:
    class Scale(nn.Module):
        def __init__(self, by: Tensor) -> None:
            super().__init__()
            self.register_buffer("by", by)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by  # pyright: ignore[reportOperatorIssue]

    by = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
    return Made(nn.Sequential(nn.Linear(D, D), Scale(by), nn.Tanh(), nn.Linear(D, D), Scale(by), nn.Linear(D, 3)))


class Counting(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.n, self.used = 0, used

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x / self.n if self.used else x


@on("`self.n += 1`, which nothing reads", "warned", "lacks the change of the attribute")
def counter() -> Made:
    return Made(Between(Counting(used=False)))


@on("`self.n += 1`, which `forward` reads", "refused", "self.n += 1", "a buffer, and `self.n.add_(1)`")
def counter_read() -> Made:
    return Made(Between(Counting(used=True)))


class Kept(nn.Module):
    ema: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x - self.ema


@on("`self.ema = 0.9 * self.ema + ...`, an attribute", "refused", "self.ema = 0.9 * self.ema", "a buffer changed in place")
def attribute() -> Made:
    return Made(Between(Kept()))


class Noted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().norm()
        return x


@on(
    "an activation kept as an attribute for later (`self.last = ...`)",
    "warned",
    "lacks the change of the attribute",
    "return it, and read it in a metric or the loss",
)
def noted() -> Made:
    return Made(Between(Noted()))


@on("dropout", "equal")
def dropout() -> Made:
    return Made(Between(nn.Dropout(0.5)), whole=True)


@on("`F.dropout(x, training=self.training)`, in place", "equal")
def functional_dropout() -> Made:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * 2, 0.3, training=self.training, inplace=True)

    return Made(Between(Dropped()), whole=True)


@on(
    "`F.dropout(x)`, which drops in evaluation, too", "warned", "evaluates what it trains", "`F.dropout(x, training=self.training)`"
)
def always_dropout() -> Made:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5)

    return Made(Between(Dropped()), whole=True)


class Depth(nn.Module):
    """A block that is left out at random, by sample or as a whole."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.block = by, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + 0.5 * self.block(x)
        if self.by == "samples":
            return x + (torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5) * self.block(x)
        left_out = torch.rand(1) < 0.5 if self.by == "torch" else random.random() < 0.5
        return x if left_out else x + self.block(x)


@on(
    "stochastic depth by `torch.rand(len(x))`, and another path in evaluation",
    "warned",
    "evaluates what it trains",
    "evaluate by pipeline.state_dict()",
)
def depth_by_sample() -> Made:
    return Made(Between(Depth("samples")), whole=True)


@on(
    "stochastic depth by `if torch.rand(1) < p`",
    "refused",
    "depends on a tensor's value",
    "a mask: (torch.rand(len(x), 1) < p) * block(x)",
)
def depth_by_torch() -> Made:
    return Made(Between(Depth("torch")), whole=True)


@on(
    "stochastic depth by `if random.random() < p`",
    "refused",
    "random.random() < 0.5",
    "a mask: `(torch.rand(x.shape[0], 1) < p) * block(x)`",
)
def depth_by_python() -> Made:
    return Made(Between(Depth("python")), whole=True)


@on(
    "noise by `torch.randn_like`, in training and evaluation",
    "warned",
    "draws random numbers",
    "dropout, which evaluation leaves out",
)
def noise() -> Made:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn_like(x)

    return Made(Between(Noisy()), whole=True)


@on(
    "`if self.training`: another path in evaluation",
    "warned",
    "evaluates what it trains",
    "evaluate by pipeline.state_dict()",
)
def two_paths() -> Made:
    class Paths(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.training else x

    return Made(Between(Paths()))


@on("`state_dict` hooks that rename", "equal")
def renamed() -> Made:
    model = Between(nn.Linear(D, D))

    def rename(module: nn.Module, state: dict, prefix: str, extra: dict) -> None:
        for name in list(state):
            state[f"net.{name}"] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    return Made(model)


@lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64) / size


@on("tensors kept by `lru_cache` of a function", "equal")
def cached_elsewhere() -> Made:
    table.cache_clear()

    class Tables(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * table(D))

    return Made(Tables(nn.Linear(D, D)))


@on("a momentum encoder by `.data`, a micro-batch a mini-batch", "equal")
def momentum_encoder() -> Made:
    class Momentum(Between):
        def __init__(self) -> None:
            super().__init__(nn.Linear(D, D))
            self.slow = nn.Linear(D, D).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for own, slow in zip(self.mid.parameters(), self.slow.parameters() if self.training else (), strict=False):
                slow.data = 0.9 * slow.data + 0.1 * own.data
            return super().forward(x) + self.slow(x).mean(1, keepdim=True)

    return Made(Momentum(), whole=True)


@on("a count in an object, or in a variable of the file", "warned", "lacks the change of")
def counted_elsewhere() -> Made:
    class Counter:
        n = 0

    class Counts(Between):
        def __init__(self) -> None:
            super().__init__(nn.Linear(D, D))
            self.counter = Counter()

        def forward(self, x: Tensor) -> Tensor:
            self.counter.n += 1
            return super().forward(x)

    return Made(Counts())


SCALE = {"by": 1.0}


@on(
    "a variable that the program changes between steps",
    "warned",
    "when the workers started",
    "a new gpp.parallelize",
)
def changed_elsewhere() -> Made:
    SCALE["by"] = 1.0

    class Scaled(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * SCALE["by"]

    return Made(Scaled(nn.Linear(D, D)), between=lambda done: SCALE.update(by=1.0 + done))
