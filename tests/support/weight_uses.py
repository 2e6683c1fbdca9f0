"""Ways in which a layer [B, D] -> [B, D] may read its weights: as they are, through a view, or as a tensor computed from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D = 6

Use = Callable[["Using", Tensor], Tensor]


class Using(nn.Module):
    """A layer with parameters of several shapes, of which `use` reads some."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.w, self.g = nn.Parameter(torch.randn(D, D) / 2), nn.Parameter(torch.randn(D) / 2)
        self.heads = nn.Parameter(torch.randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Through(nn.Module):
    """A module of torch's as such a layer; `shape` is that of one sample inside, and the module's first result counts."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...], copies: int = 1) -> None:
        super().__init__()
        self.inner, self.shape, self.copies = make(), shape, copies

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(*[x.reshape(-1, *self.shape)] * self.copies)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1, D)


def _written(layer: Using, x: Tensor) -> Tensor:
    z = torch.zeros_like(layer.w)
    z[0] = layer.g
    return x @ (z + 1.0)


def _by_heads(layer: Using, x: Tensor) -> Tensor:
    # A product with a batch dimension on one side: torch copies the weight for each sample, and keeps the copies.
    return torch.matmul(x.reshape(-1, 3, 1, 2), layer.heads).reshape(-1, D)


def _queries(layer: Using, x: Tensor) -> Tensor:
    q, tokens = F.linear(layer.w[:3], layer.w[:2])[None].expand(x.shape[0], -1, -1), x.reshape(-1, 3, 2)
    return F.scaled_dot_product_attention(q, tokens, tokens).reshape(-1, D)


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(D, D))


CURRENT: dict[str, Callable[[], nn.Module]] = {
    "transposed": partial(Using, lambda m, x: x @ m.w.t()),
    "reshaped": partial(Using, lambda m, x: x @ m.w.reshape(2, 3, D).reshape(D, D)),
    "a row": partial(Using, lambda m, x: x * m.w[0]),
    "expanded": partial(Using, lambda m, x: x * m.g[None].expand(x.shape[0], -1)),
    "softplus": partial(Using, lambda m, x: x + F.softplus(m.g)),
    "squared": partial(Using, lambda m, x: x + m.g * m.g),
    "einsum": partial(Using, lambda m, x: torch.einsum("bhd,hde->bhe", x.reshape(-1, 3, 2), m.heads).reshape(-1, D)),
    "batch norm": partial(nn.BatchNorm1d, D),
    "convolution": partial(Through, partial(nn.Conv1d, 2, 2, 3, padding=1), (2, 3)),
    "lstm": partial(Through, partial(nn.LSTM, 3, 3, batch_first=True), (2, 3)),
    "gru": partial(Through, partial(nn.GRU, 3, 3, batch_first=True), (2, 3)),
    "attention": partial(Through, partial(nn.MultiheadAttention, 2, 2, batch_first=True), (3, 2), 3),
    "bilinear": partial(Through, partial(nn.Bilinear, D, D, D), (D,), 2),
    "layer norm": lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.PReLU(D)),
}
"""Whatever autograd keeps of these weights is their own memory."""

DERIVED: dict[str, Callable[[], nn.Module]] = {
    "scaled": partial(Using, lambda m, x: x @ (m.w * 0.5)),
    "cast": partial(Using, lambda m, x: x @ m.w.float().to(x.dtype)),
    "copied": partial(Using, lambda m, x: x @ m.w.t().contiguous()),
    "joined": partial(Using, lambda m, x: x @ torch.cat([m.w[:3], m.w[3:]])),
    "repeated": partial(Using, lambda m, x: x * m.g[None].repeat(x.shape[0], 1)),
    "gated": partial(Using, lambda m, x: x * torch.sigmoid(m.g)),
    "exponential": partial(Using, lambda m, x: x + torch.exp(m.g)),
    "detached": partial(Using, lambda m, x: x @ (m.w.detach() * 0.5) + x @ m.w),
    "written into zeros": partial(Using, _written),
    "copied inside an operator": partial(Using, _by_heads),
    "queries": partial(Using, _queries),
    "weight norm": _normed(nn.utils.parametrizations.weight_norm),
    "instance norm": partial(Through, partial(nn.InstanceNorm1d, 2, affine=True), (2, 3)),
}
"""Of these autograd keeps what the forward has computed from them."""


class UsingStages(nn.Module):
    """A layer of one of these kinds between others, each a stage."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = nn.Linear(D, D), (CURRENT | DERIVED)[use](), nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.s2(self.s1(self.s0(x)))
