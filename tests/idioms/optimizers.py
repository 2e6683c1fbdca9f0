"""Optimizers, and what is done around their steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gpp
from tests.idioms.case import D, Made, idiom, sgd
from tests.idioms.parameters import Between

on = partial(idiom, theme="Optimizers")


def model() -> Between:
    return Between(nn.Linear(D, D))


@on("a function: `lambda params: torch.optim.AdamW(params, lr=0.01)`", "equal")
def function() -> Made:
    return Made(model(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))


@on("a class: `torch.optim.AdamW`", "equal")
def class_alone() -> Made:
    return Made(model(), optimizer=torch.optim.AdamW)


@on("`functools.partial(torch.optim.SGD, lr=0.1, nesterov=True, momentum=0.9)`", "equal")
def partial_class() -> Made:
    return Made(model(), optimizer=partial(torch.optim.SGD, lr=0.1, nesterov=True, momentum=0.9))


@on("an optimizer over `model.parameters()`", "equal")
def instance() -> Made:
    net = model()
    return Made(net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01))


@on("groups by name: weight decay for weights, none for biases; rates of their own", "equal")
def groups() -> Made:
    net = model()
    weights = [p for name, p in net.named_parameters() if "bias" not in name]
    biases = [p for name, p in net.named_parameters() if "bias" in name]
    made = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.003}]
    return Made(net, optimizer=torch.optim.AdamW(made, lr=0.01))


@on("`fused=True`", "equal")
def fused() -> Made:
    return Made(model(), optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True))


@on("`foreach=True`", "equal")
def foreach() -> Made:
    return Made(model(), optimizer=partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True))


@on("a rate that is a tensor", "equal")
def tensor_rate() -> Made:
    return Made(
        model(), optimizer=lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False)
    )


@on("a scheduler of torch's over the optimizer, with a warm-up from 0", "equal")
def scheduler() -> Made:
    net = model()
    made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 2)
    return Made(net, optimizer=made, between=lambda done: warm.step())


@on("`OneCycleLR`, which moves rates and momenta", "equal")
def one_cycle() -> Made:
    net = model()
    groups = [{"params": net.first.parameters(), "lr": 0.1}, {"params": [*net.mid.parameters(), *net.last.parameters()]}]
    made = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    steps = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=[0.3, 0.1], total_steps=4)
    return Made(net, optimizer=made, between=lambda done: steps.step())


@on("the rate of a group set by the program (`group['lr'] = ...`)", "equal")
def rate_by_hand() -> Made:
    net = model()
    made = torch.optim.SGD(net.parameters(), lr=0.1)

    def between(done: int) -> None:
        for group in made.param_groups:
            group["lr"] = 0.1 / (1 + done)

    return Made(net, optimizer=made, between=between)


@on("`requires_grad` set between steps (gradual unfreezing)", "refused", "requires_grad", "a new gpp.parallelize of the model")
def unfreezing() -> Made:
    net = model()
    net.first.requires_grad_(False)
    made = sgd(list(net.parameters()))
    return Made(net, optimizer=made, between=lambda done: net.first.requires_grad_(done > 1) and None)


@on(
    "weights changed by the program between steps (`load_state_dict`, clamping)",
    "warned",
    "has changed weights",
    "an optimizer class whose `step` clamps; else a new gpp.parallelize",
)
def changed_weights() -> Made:
    net = model()

    def between(done: int) -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.1, 0.1)

    return Made(net, optimizer=sgd, between=between)


@on("`eval()` of the model between steps", "warned", "mode of their start", "`pipeline.evaluate`")
def evaluating() -> Made:
    net = Between(nn.Dropout(0.5))
    return Made(net, optimizer=sgd, between=lambda done: net.eval() and None, whole=True)


@on("clipping by norm", "equal")
def clipped() -> Made:
    return Made(model(), clip=0.05, settings={"optimizer": gpp.ByFactory(factory=sgd, clip_norm=0.05)})


@on(
    "clipping by value, in a hook of the optimizer",
    "refused",
    "has hooks around its steps",
    "gpp.ByFactory(factory=..., clip_norm=1.0)",
)
def clipped_by_value() -> Made:
    def make(params: Any) -> torch.optim.Optimizer:
        made = sgd(params)
        made.register_step_pre_hook(lambda optimizer, args, kwargs: nn.utils.clip_grad_value_(params, 0.01))
        return made

    return Made(model(), optimizer=make)


@on("an optimizer that has taken steps", "refused", "has taken steps before", "a new one")
def begun() -> Made:
    net = model().double()
    made = torch.optim.Adam(net.parameters(), lr=0.01)
    net(torch.randn(2, D, dtype=torch.float64)).sum().backward()
    made.step()
    made.zero_grad()
    return Made(net, optimizer=made)


@on("an optimizer over a part of the model", "refused", "leaves out", "requires_grad_(False) for the rest")
def part() -> Made:
    net = model()
    return Made(net, optimizer=torch.optim.AdamW(net.last.parameters(), lr=0.01))


@on("`torch.optim.LBFGS`, which needs a closure", "refused", "needs a closure", "torch.optim.AdamW")
def lbfgs() -> Made:
    return Made(model(), optimizer=torch.optim.LBFGS)


@on("an optimizer class of one's own, that steps by a parameter's own gradient", "equal")
def own_class() -> Made:
    return Made(model(), optimizer=partial(Signed, lr=0.01))


class Signed(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


@on(
    "an optimizer that looks at all gradients at once",
    "refused",
    "by more than its own gradient",
    "gpp.ByFactory(factory=..., clip_norm=1.0)",
)
def own_norm() -> Made:
    return Made(model(), optimizer=partial(Normed, lr=0.01))


class Normed(Signed):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every if p.grad is not None]).norm()
        for p in every:
            assert isinstance(p.grad, Tensor)
            p.sub_(p.grad / norm * self.param_groups[0]["lr"])


@on(
    "two optimizers, as Muon for matrices and AdamW for the rest",
    "refused",
    "must be a function that returns a torch.optim.Optimizer",
    "`gpp.Muon`",
)
def two() -> Made:
    net = model()

    def make(params: Any) -> Any:
        return [torch.optim.Muon([p for p in params if p.ndim == 2]), torch.optim.AdamW([p for p in params if p.ndim != 2])]

    return Made(net, settings={"optimizer": make})


class Matrices(nn.Module):
    """No biases, since torch's Muon takes matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D, bias=False), nn.Linear(D, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@on("`torch.optim.Muon` over parameters that are no matrices", "refused", "Muon only supports 2D parameters", "`gpp.Muon`")
def muon_of_biases() -> Made:
    return Made(model(), optimizer=torch.optim.Muon)


CLASSES = [
    getattr(torch.optim, name)
    for name in sorted(set(torch.optim.__all__) - {"Optimizer", "LBFGS"})
    if isinstance(getattr(torch.optim, name), type)
]
"""All optimizers of torch that take gradients as they are."""


def _of_class(cls: Any) -> None:
    name = f"`torch.optim.{cls.__name__}`"
    make = lambda: Made(Matrices(), optimizer=partial(cls, lr=0.01))  # noqa: E731  # a row for each
    make.__name__ = f"torch_{cls.__name__}"
    if cls is torch.optim.SparseAdam:
        on(name, "refused", "does not support dense gradients", "`torch.optim.Adam`")(make)
    else:
        on(name, "equal")(make)


for _cls in CLASSES:
    _of_class(_cls)
