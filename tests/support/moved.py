"""Bytes that operators read and write, and how many operators that are."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Moved(TorchDispatchMode):
    """While it is active: `bytes` moved through memory by operators on tensors of more than one element, and their `launches`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if view or name.startswith(("empty", "new_empty", "_unsafe_view")):
            return out  # no values, or those of another
        first = {id(t) for t in tree_leaves(args[:1])}
        overwritten = first if name in ("copy_", "_foreach_copy_", "_foreach_zero_") or name.endswith("_like") else set[int]()
        overwritten |= {id((kwargs or {}).get(a.name)) for a in func._schema.arguments if a.is_out}
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and id(t) not in overwritten}
        # Operators on lists that work in place return nothing.
        written = tree_leaves(args[0] if name.startswith("_foreach") and name.endswith("_") else out)
        many = [t for t in (*read.values(), *written) if isinstance(t, torch.Tensor) and t.numel() > 1]
        self.bytes += sum(t.numel() * t.element_size() for t in many)
        self.launches += bool(many)
        return out
