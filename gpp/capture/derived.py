"""Tensors that follow from trained parameters alone, found while operators run.

A backward that is to use other weights than its forward finds them in the parameters' own memory. A tensor that the
forward has computed from a parameter (`weight * 0.5`, a cast, a normalised weight) and that autograd keeps has memory of
its own, and with it the forward's weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ACTIVATION = None
"""In place of names: the tensor depends on an input."""


@final
class Derivations(TorchDispatchMode):
    """Follows what tensors are computed from, below autograd: the parts of a composite operator count one by one.

    A tensor without an entry is a constant, a buffer or a frozen parameter, or random.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, frozenset[str] | None] = {}
        self._own: set[int] = set()

    def add_parameter(self, name: str, tensor: Tensor) -> None:
        """Make a trained parameter known."""
        self._of[_storage(tensor)] = frozenset([name])
        self._own.add(_storage(tensor))

    def add_input(self, tensor: Tensor) -> None:
        """Make a tensor of samples known."""
        self._of[_storage(tensor)] = _ACTIVATION

    def derived_from(self, tensor: Tensor) -> frozenset[str]:
        """Trained parameters that a tensor was computed from; empty for one of their own memory, and where an input counts too."""
        key = _storage(tensor)
        return frozenset() if key in self._own else self._of.get(key) or frozenset()

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a trained parameter, or follows from such parameters alone."""
        return bool(self._of.get(_storage(tensor)))

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        sources = [self._of[key] for key in read if key in self._of]
        names = _ACTIVATION if _ACTIVATION in sources else frozenset[str]().union(*(s for s in sources if s is not None))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := _storage(leaf)) not in self._own:
                if key in read and not func._schema.is_mutable:
                    continue  # a view
                if names == frozenset():
                    self._of.pop(key, None)
                else:
                    self._of[key] = names
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
