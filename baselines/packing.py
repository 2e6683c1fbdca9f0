"""The tensors of a boundary packed into the two that DeepSpeed sends best: one with a gradient and one without.

DeepSpeed's backward runs once for each floating-point output, through the whole stage each time, and it takes every
floating-point tensor for one with a gradient. So tensors with a gradient are laid end to end in one tensor, and all
others (token ids, masks, inputs) travel as bytes in another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Packing:
    """The layout of the tensors of one boundary in its messages.

    Args:
        examples: tensors of the right shapes and dtypes, in the boundary's order; those with a gradient require one.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        self.shapes = [tuple(tensor.shape) for tensor in examples]
        self.dtypes = [tensor.dtype for tensor in examples]
        self.trained = [i for i, tensor in enumerate(examples) if tensor.requires_grad]
        rest = [i for i in range(len(examples)) if i not in self.trained]
        # Larger elements come first: each tensor's bytes then begin at a multiple of its element size.
        self.rest = sorted(rest, key=lambda i: -examples[i].element_size())
        self.sizes = [tensor.numel() for tensor in examples]

    def pack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The messages: the tensor with a gradient if there is any, then the bytes if there are any."""
        out: list[Tensor] = []
        if len(self.trained) == 1:
            out.append(tensors[self.trained[0]])
        elif self.trained:
            out.append(torch.cat([tensors[i].reshape(-1) for i in self.trained]))
        if self.rest:
            out.append(torch.cat([tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in self.rest]))
        return tuple(out)

    def unpack(self, messages: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that `pack` was given."""
        out: list[Tensor | None] = [None] * len(self.shapes)
        left = list(messages)
        if len(self.trained) == 1:
            out[self.trained[0]] = left.pop(0)
        elif self.trained:
            for i, part in zip(self.trained, left.pop(0).split([self.sizes[i] for i in self.trained]), strict=True):
                out[i] = part.view(self.shapes[i])
        if self.rest:
            sizes = [self.sizes[i] * self.dtypes[i].itemsize for i in self.rest]
            for i, part in zip(self.rest, left.pop(0).split(sizes), strict=True):
                out[i] = part.view(self.dtypes[i]).view(self.shapes[i])
        return tuple(tensor for tensor in out if tensor is not None)
