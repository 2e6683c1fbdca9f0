"""Buffers that a module assigns instead of changing them in place, which torch.export would lose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def in_place(whole: nn.Module) -> Iterator[None]:
    """Let a module that assigns another tensor to one of its buffers write it there: torch.export loses what is assigned.

    It is written when the module's forward ends, so that what the forward computes from either tensor is not touched.
    """
    paths = {module: path for path, module in whole.named_modules()}
    before: dict[nn.Module, dict[str, Tensor | None]] = {}

    def note(module: nn.Module, args: Any) -> None:
        before[module] = dict(module._buffers)

    def write(module: nn.Module, args: Any, output: Any) -> None:
        for name, old in before.pop(module, {}).items():
            new, path = module._buffers.get(name), paths.get(module)
            if path is None or old is None or new is None or new is old or (old.shape, old.dtype) != (new.shape, new.dtype):
                continue
            old.copy_(new.detach())
            module._buffers[name] = old

    handles = nn.modules.module.register_module_forward_pre_hook(note), nn.modules.module.register_module_forward_hook(write)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
