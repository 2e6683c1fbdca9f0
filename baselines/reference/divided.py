"""Gradients of inputs that several devices make, as the loop of one process follows them: one product for each device's columns.

Which bits a product has may hang on its size, so it has to be made in the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

Columns = Sequence[tuple[int, int]]
"""[lo, hi) of every device, in order."""


def in_parts(columns: Columns) -> Any:
    """A linear operator whose gradient of its input is made in these parts."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _InParts.apply(input, weight, bias, columns)  # type: ignore[return-value]

    return linear


@final
class _InParts(torch.autograd.Function):
    """[.., K] -> [.., M]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, columns: Columns) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        ctx.has_bias, ctx.columns = bias is not None, columns
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        parts = [torch.mm(rows.contiguous(), weight[:, lo:hi].contiguous()) for lo, hi in ctx.columns if hi > lo]
        own = torch.cat(parts, 1).reshape(input.shape)
        of_weight = torch.mm(rows.t(), input.reshape(-1, input.shape[-1]))
        return own, of_weight, rows.sum(0) if ctx.has_bias else None, None
