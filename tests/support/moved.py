"""Bytes that operators read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Moved(TorchDispatchMode):
    """While it is active: `bytes` moved through memory by operators on tensors of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::empty") or any(
            r.alias_info and not r.alias_info.is_write for r in func._schema.returns
        ):
            return out  # memory without values, or a view
        overwritten = {id(args[0])} if func is torch.ops.aten.copy_.default else set()
        if func._schema.name.endswith("_like"):
            overwritten = {id(args[0])}
        overwritten |= {id((kwargs or {}).get(a.name)) for a in func._schema.arguments if a.is_out}
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and id(t) not in overwritten}
        for tensor in (*read.values(), *(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))):
            self.bytes += tensor.numel() * tensor.element_size() if tensor.numel() > 1 else 0
        return out
