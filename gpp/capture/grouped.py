"""Products of rows with the matrix of their group, as in a mixture of experts: an operator of this project's own.

    ends = [2, 2, 5]      rows 0 and 1 meet matrix 0, none meets matrix 1, rows 2 to 4 meet matrix 2

Torch's own operator, `aten._grouped_mm`, is traced in bfloat16 alone and has no float64, so Transformers traces another one in its
place. Workers do not import the libraries of a model, so this one stands for that (`gpp.capture.codec.EQUIVALENT`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("gpp", "DEF")
_LIBRARY.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("grouped_mm_forward(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_LIBRARY.define("grouped_mm_gradient(Tensor rows, Tensor gradients, Tensor ends) -> Tensor")


def _stretches(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Each group that has rows, and its slice of them. `ends` is [groups]."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
            start = end


@torch.library.impl(_LIBRARY, "grouped_mm", "CompositeImplicitAutograd")
def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[S, n]: every row times the matrix of its group; zero for rows behind the last group.

    Args:
        rows: [S, k], those of a group together, in the order of the groups.
        matrices: [groups, k, n].
        ends: [groups] integers; where the rows of each group end.
    """
    # Autograd says of views, and not of leaves, whether half a backward asks for their gradients.
    return torch.ops.gpp.grouped_mm_forward(rows.view_as(rows), matrices.view_as(matrices), ends)


@torch.library.impl(_LIBRARY, "grouped_mm_forward", "CompositeExplicitAutograd")
def grouped_mm_forward(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[S, n] of rows [S, k] and matrices [groups, k, n]: `grouped_mm` without the gradients."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, own in _stretches(ends):
        torch.mm(rows[own], matrices[group], out=out[own])
    return out


@torch.library.impl(_LIBRARY, "grouped_mm_gradient", "CompositeExplicitAutograd")
def grouped_mm_gradient(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    """[groups, k, n]: the gradient of the matrices, from rows [S, k] and the gradient of their products, [S, n]."""
    out = rows.new_zeros(ends.shape[0], rows.shape[1], gradients.shape[1])
    for group, own in _stretches(ends):
        torch.mm(rows[own].t(), gradients[own], out=out[group])
    return out


@torch.library.register_fake("gpp::grouped_mm_forward", lib=_LIBRARY)
def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@torch.library.register_fake("gpp::grouped_mm_gradient", lib=_LIBRARY)
def _gradient(rows: Tensor, gradients: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradients.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ends = ctx.saved_tensors
    # `needs_input_grad` says what could be asked for; half a backward asks for one of the two.
    of_rows, of_matrices = (node is not None and torch._C._will_engine_execute_node(node) for node, _ in ctx.next_functions[:2])
    return (
        torch.ops.gpp.grouped_mm_forward(gradient, matrices.transpose(-2, -1), ends) if of_rows else None,
        torch.ops.gpp.grouped_mm_gradient(rows, gradient, ends) if of_matrices else None,
        None,
    )


torch.library.register_autograd("gpp::grouped_mm_forward", _back, setup_context=_keep, lib=_LIBRARY)
