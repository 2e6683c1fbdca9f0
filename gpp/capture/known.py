"""What follows from numbers of Python alone is computed while a model is traced, so that its code may look at it.

Models of pictures of several sizes walk over a list of grids, and cut and order patches by it. `torch.export` knows the sizes of a
tensor, and no values: of a tensor that is made of numbers (`torch.tensor(grid)`, `torch.arange(h * w)`) it forgets them at once.
Here such a tensor has its values, and is a constant of what is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_MAKERS = frozenset((torch.tensor, torch.as_tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace))
"""Functions that make a tensor of numbers."""


class KnownValues(TorchFunctionMode):
    """Call functions of tensors with known values outside the trace; what they return has known values, too.

    A function with another tensor among its arguments is traced, and so is one that draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}  # by id; they are kept, so that no id has two meanings

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function returns."""
        named, leaves = dict(kwargs or {}), tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        symbols = any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves)
        known = all(id(tensor) in self._known for tensor in tensors) and not symbols
        if not known or not (tensors or func in _MAKERS):
            return func(*args, **named)
        with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
            before = torch.get_rng_state()
            found = func(*args, **named)
            drawn = not torch.equal(before, torch.get_rng_state())
        if drawn:
            torch.set_rng_state(before)
            return func(*args, **named)
        self._known |= {id(leaf): leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}
        return found
