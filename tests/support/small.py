"""Small networks, each with one thing that a pipeline may get wrong. Submodule `sN` is stage N; what follows the network
(and joins outside of submodules) goes to the last stage that it reads from.

Shapes: B micro-batch, D = 6 everywhere; the target y is [B, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpp.models.base import AbstractModel, TensorSpec
from tests.support.weight_uses import CURRENT, DERIVED, UsingStages

D = 6


def layer() -> nn.Module:
    """[B, D] -> [B, D], neither linear nor with zero gradients anywhere."""
    return nn.Sequential(nn.Linear(D, D), nn.Tanh())


class Join(nn.Module):
    """Several [B, D] -> [B, D]."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.mix = nn.Linear(num * D, D)

    def forward(self, *xs: Tensor) -> Tensor:
        return self.mix(torch.cat(xs, dim=-1)).tanh()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = layer(), layer(), layer()

    def forward(self, x: Tensor) -> Any:
        return self.s2(self.s1(self.s0(x)))


class Chain4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = layer(), layer(), layer(), layer()

    def forward(self, x: Tensor) -> Any:
        return self.s3(self.s2(self.s1(self.s0(x))))


class Halved(nn.Linear):
    """A layer that computes with half its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 0.5, self.bias)


class Halved4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = (nn.Sequential(Halved(D, D), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        return self.s3(self.s2(self.s1(self.s0(x))))


class Fork(nn.Module):
    """s0 -> {s1, s2} -> s3; the branches differ, so that swapping them shows."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = layer(), layer(), nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), Join(2)

    def forward(self, x: Tensor) -> Any:
        h = self.s0(x)
        return self.s3(self.s1(h), 3.0 * self.s2(h))


class Skip(nn.Module):
    """s0's output goes to s1 and, over two stages, to s3."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = layer(), layer(), layer(), Join(2)

    def forward(self, x: Tensor) -> Any:
        h = self.s0(x)
        return self.s3(h, self.s2(self.s1(h)))


class TwoSources(nn.Module):
    """Two towers; the last stage reads an input of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = layer(), layer(), Join(3)

    def forward(self, x: Tensor, other: Tensor, late: Tensor) -> Any:
        return self.s2(self.s0(x), self.s1(other), late)


class TwoSinks(nn.Module):
    """s0 -> {s1, s2}, each with a loss term."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = layer(), layer(), layer()

    def forward(self, x: Tensor) -> Any:
        h = self.s0(x)
        return {"one": self.s1(h), "two": self.s2(h)}


class TwoLosses(nn.Module):
    """A term in the middle of the chain, and two at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = layer(), layer(), layer()

    def forward(self, x: Tensor) -> Any:
        h = self.s1(self.s0(x))
        end = self.s2(h)
        return {"middle": h, "end": end, "small": end.square()}


class Tied(nn.Module):
    """The first and the last stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = nn.Linear(D, D), layer(), nn.Linear(D, D)
        self.s2.weight = self.s0.weight

    def forward(self, x: Tensor) -> Any:
        return self.s2(self.s1(self.s0(x).tanh()))


class Frozen(nn.Module):
    """A frozen tower of two stages beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = layer(), layer(), layer(), Join(2)
        for tower in (self.s0, self.s1):
            tower.requires_grad_(False)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.s3(self.s1(self.s0(x)), self.s2(other))


class FrozenSkip(nn.Module):
    """A frozen stage that feeds a trained chain at its beginning and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = layer(), layer(), layer(), Join(2)
        self.s0.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h = self.s0(x)
        return self.s3(h, self.s2(self.s1(h)))


class Rereading(nn.Module):
    """The first stage makes a tensor and a boolean one, which all later stages read; each also reads what the one before makes, and
    the last two are branches."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3, self.s4 = Gate(), Gated(), Gated(), Gated(), Gated()
        self.s5 = Join(2)

    def forward(self, x: Tensor) -> Any:
        h, gate = self.s0(x)
        a = self.s1(h, h, gate)
        b = self.s2(a, h, gate)
        return self.s5(self.s3(b, h, gate), self.s4(b, h, gate))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.again = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, h: Tensor, first: Tensor, gate: Tensor) -> Tensor:
        return torch.where(gate, self.mix(h), self.again(first)).tanh()


class Integers(nn.Module):
    """Token ids in; the stage between hands ids on as well."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = nn.Embedding(11, D), layer(), Looking()

    def forward(self, ids: Tensor) -> Any:
        h = self.s1(self.s0(ids).mean(1))
        return self.s2(h, h.argmax(-1))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(D, D), nn.Linear(D, D)

    def forward(self, h: Tensor, chosen: Tensor) -> Tensor:
        return self.mix(h) * self.table(chosen)


class Masking(nn.Module):
    """A boolean tensor crosses two boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = Gate(), layer(), Choose()

    def forward(self, x: Tensor) -> Any:
        h, gate = self.s0(x)
        return self.s2(self.s1(h), gate)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.mix(x)
        return h.tanh(), h > 0


class Choose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, D)

    def forward(self, h: Tensor, gate: Tensor) -> Tensor:
        return torch.where(gate, self.mix(h), 0.1 * h)


class Dropping(nn.Module):
    """Dropout in a frozen stage, in a trained one and behind a replicated one."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2 = (nn.Sequential(nn.Linear(D, D), nn.Dropout(0.4)) for _ in range(3))
        self.s0.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.s2(self.s1(self.s0(x)))


class NormedBatch(nn.Module):
    """Running statistics in every stage, the last included."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1 = (nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.s1(self.s0(x))


class ThreeOutputs(nn.Module):
    """One stage hands three tensors with a common past to three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = Trident(), layer(), layer(), Join(3)

    def forward(self, x: Tensor) -> Any:
        a, b, c = self.s0(x)
        return self.s3(self.s1(a), self.s2(b), c)


class Trident(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.shared(x).tanh()
        return self.a(h), self.b(h), self.c(h)


class Turned(nn.Module):
    """Transposed and sliced tensors at the boundary: neither contiguous nor batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1 = Turning(), Turning()

    def forward(self, x: Tensor) -> Any:
        return self.s1(self.s0(x).T).T


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)[:, ::2].T


class Springs(nn.Module):
    """Four weights, one a stage, whose outputs go on untouched: with `half_squares` each is a w -> w^2 / 2 of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.s0, self.s1, self.s2, self.s3 = Spring(), Spring(), Spring(), Spring()

    def forward(self, x: Tensor) -> Any:
        return self.s3(self.s2(self.s1(self.s0(x))))[:, D:]


class Spring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([h, self.w * torch.ones_like(h[:, :1])], dim=-1)


NETWORKS = {
    kind.__name__: kind
    for kind in (
        *(Chain, Chain4, Fork, Skip, TwoSources, TwoSinks, TwoLosses, Tied, Frozen, FrozenSkip, Integers, Masking, Dropping),
        *(NormedBatch, Turned, ThreeOutputs, Springs, Halved4, Rereading),
    )
} | {f"uses: {use}": partial(UsingStages, use) for use in CURRENT | DERIVED}
INPUTS = {
    "TwoSources": {name: TensorSpec(shape=(D,)) for name in ("x", "other", "late")},
    "Frozen": {name: TensorSpec(shape=(D,)) for name in ("x", "other")},
    "Integers": {"ids": TensorSpec(shape=(3,), dtype="int", high=11)},
}


def squares(outputs: Any, y: Tensor) -> Tensor | dict[str, Tensor]:
    """Mean squared difference to y of the output, or of each named one with a weight of its own."""
    if isinstance(outputs, Tensor):
        return F.mse_loss(outputs, y)
    return {name: (1.0 + 0.5 * i) * F.mse_loss(output, y) for i, (name, output) in enumerate(outputs.items())}


def half_squares(outputs: Tensor, y: Tensor) -> Tensor:
    """Half the squared norm of the output, mean over samples; y is not looked at."""
    return 0.5 * outputs.square().sum(-1).mean() + 0.0 * y.mean()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Small(AbstractModel):
    """One of `NETWORKS`."""

    name: str = "small"
    loss: str = "tests.support.small.squares"
    kind: str

    def build(self) -> nn.Module:
        return NETWORKS[self.kind]()

    def inputs(self) -> dict[str, TensorSpec]:
        return INPUTS.get(self.kind, {"x": TensorSpec(shape=(D,))})

    def targets(self) -> dict[str, TensorSpec]:
        return {"y": TensorSpec(shape=(D,))}

    def source(self) -> str:
        return "tests"
