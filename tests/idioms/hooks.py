"""Hooks, autograd and control flow."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.idioms.case import D, Made, idiom
from tests.idioms.parameters import Between

on = partial(idiom, theme="Hooks, autograd, control flow")


def by(forward: object) -> Between:
    """A model with a function between its layers."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.layer, x)  # type: ignore[operator]

    return Between(Inner())


@on("`h.register_hook` on an activation", "refused", "register_hook", "write its effect into the forward")
def activation_hook() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return h

    return Made(by(forward))


@on(
    "`p.register_hook` on a parameter",
    "refused",
    "the parameter mid.weight (register_hook)",
    "clip by norm: `gpp.ByFactory(factory=..., clip_norm=1.0)`",
)
def parameter_hook() -> Made:
    model = Between(nn.Linear(D, D))
    model.mid.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # pyright: ignore[reportCallIssue]
    return Made(model)


@on(
    "`p.register_post_accumulate_grad_hook`",
    "refused",
    "the parameter mid.weight (register_post_accumulate_grad_hook)",
    "write its effect into the forward",
)
def accumulate_hook() -> Made:
    model = Between(nn.Linear(D, D))

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model.mid.weight.register_post_accumulate_grad_hook(halve)  # pyright: ignore[reportCallIssue]
    return Made(model)


@on("forward hooks and pre-hooks of modules", "equal")
def forward_hooks() -> Made:
    model = Between(nn.Linear(D, D))
    model.mid.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.mid.register_forward_hook(lambda module, args, output: output + args[0])
    return Made(model)


@on("`register_full_backward_hook`", "refused", "the module mid (register_full_backward_hook)", "write its effect into the forward")
def backward_hook() -> Made:
    model = Between(nn.Linear(D, D))
    model.mid.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return Made(model)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


@on("gradient reversal by `autograd.Function`", "refused", "Reverse is a torch.autograd.Function", "2 * x.detach() - x")
def reversal() -> Made:
    return Made(by(lambda layer, x: Reverse.apply(layer(x))))


@on("gradient reversal by `2 * x.detach() - x`", "equal")
def detached_reversal() -> Made:
    return Made(by(lambda layer, x: 2 * layer(x).detach() - layer(x)))


@on("`detach()`: no gradient through a branch", "equal")
def stopped() -> Made:
    return Made(by(lambda layer, x: layer(x) + layer(x.detach()).sigmoid().detach()))


@on("straight-through rounding: `x + (x.round() - x).detach()`", "equal")
def straight_through() -> Made:
    return Made(by(lambda layer, x: layer(x) + (layer(x).round() - layer(x)).detach()))


@on("`torch.no_grad()` around a part", "equal")
def no_grad() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = layer(x).sigmoid()
        return gate * layer(x)

    return Made(by(forward))


@on("`torch.enable_grad()` inside `no_grad()`", "equal")
def enable_grad() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = layer(x).sigmoid()
            with torch.enable_grad():
                out = layer(x)
        return gate * out

    return Made(by(forward))


@on("`torch.utils.checkpoint`", "warned", "torch.utils.checkpoint at", "strategy/memory=recompute")
def checkpointed() -> Made:
    return Made(by(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))


@on("`torch.utils.checkpoint(use_reentrant=True)`", "warned", "torch.utils.checkpoint at", "strategy/memory=recompute")
def reentrant() -> Made:
    return Made(by(lambda layer, x: checkpoint(layer, x, use_reentrant=True)))


@on("`if x.sum() > 0`", "refused", "depends on a tensor's value", "torch.where")
def data_dependent() -> Made:
    return Made(by(lambda layer, x: layer(x) if x.sum() > 0 else x))


@on(
    "`x[x > 0]`, whose size depends on values",
    "refused",
    "whose size is the data-dependent number",
    "`torch.where`, or a product with the mask",
)
def masked_select() -> Made:
    return Made(by(lambda layer, x: layer(x) + x[x > 0].sum()))


@on("`tensor.item()`", "refused", "depends on a tensor's value", "leave it a tensor")
def item() -> Made:
    return Made(by(lambda layer, x: layer(x) * float(x.abs().max().item())))


@on("an `assert` on values", "refused", "depends on a tensor's value", "leave it out")
def asserted() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return layer(x)

    return Made(by(forward))


@on("`if len(x) > 4`: another path by the number of samples", "warned", "captured at the fixed batch size", "one path")
def by_samples() -> Made:
    return Made(by(lambda layer, x: layer(x) if len(x) > 4 else x))


@on("a scale by the number of samples (`x / len(x)`)", "warned", "by the others of its batch", "a constant")
def over_samples() -> Made:
    return Made(by(lambda layer, x: layer(x) / len(x)))


@on("loops and conditions over plain Python values", "equal")
def plain_python() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        for i in range(3):
            x = layer(x) if i % 2 else x + i
        return x

    return Made(by(forward))


@on("in-place operators (`relu_`, `h[:, 0] = 0`, `+=`)", "equal")
def in_place() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x).relu_() * 2
        h += x
        h[:, 0] = 0
        return h

    return Made(by(forward))


@on("`torch.where`, `masked_fill`, `gather`, `scatter_add`, `topk`, `cumsum`, `einsum`", "equal")
def operators() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x)
        h = torch.where(h > 0, h, 0.1 * h).masked_fill(h.abs() < 0.01, 0.0)
        top, where = h.topk(3, dim=1)
        h = torch.zeros_like(h).scatter_add(1, where, top) + h.gather(1, where).sum(1, keepdim=True)
        return torch.einsum("bi,bj->bi", h.cumsum(1), F.one_hot(where[:, 0], D).to(h.dtype))

    return Made(by(forward))


@on("`torch.vmap` over a function of one's own", "refused", "is not a tensor operator that can be stored", "write the batched form")
def vmapped() -> Made:
    return Made(by(lambda layer, x: torch.vmap(lambda row: row.sin() * row.sum())(layer(x))))


@on("`autocast` inside `forward`", "refused", "autocast", "engine.autocast=bfloat16")
def autocast() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    return Made(by(forward))


@on("casts by `to(torch.bfloat16)`", "equal")
def cast() -> Made:
    return Made(by(lambda layer, x: layer(x).to(torch.bfloat16).double() * x))


@on("`torch.autograd.grad` in `forward`", "refused", "comes out of what a trace cannot follow", "the derivative as a formula")
def inner_gradient() -> Made:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = layer(x)
            (gradient,) = torch.autograd.grad(h.pow(2).sum(), x, create_graph=True)
        return h + gradient

    return Made(by(lambda layer, x: forward(layer, x.requires_grad_() if x.is_leaf else x)))
