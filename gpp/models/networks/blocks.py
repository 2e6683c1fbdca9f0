"""Modules that are called one after the other, each on outputs of earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Called(nn.Module):
    """Modules that are called in order; the last one's output is the result.

    Args:
        modules: by name, each with the names of the earlier ones and of the inputs that it reads. A name may have dots,
            and is the prefix of the module's parameters. A module that returns a tuple passes on every tensor of it.
    """

    def __init__(self, modules: Mapping[str, tuple[nn.Module, tuple[str, ...]]]) -> None:
        super().__init__()
        self._reads = {name: reads for name, (_, reads) in modules.items()}
        for name, (module, _) in modules.items():
            *prefix, last = name.split(".")
            parent: nn.Module = self
            for part in prefix:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, module)

    def forward(self, **inputs: Tensor) -> Any:
        values: dict[str, Any] = dict(inputs)
        result: Any = None
        for name, reads in self._reads.items():
            given = [values[read] if isinstance(values[read], tuple | list) else (values[read],) for read in reads]
            values[name] = result = self.get_submodule(name)(*(tensor for tensors in given for tensor in tensors))
        return result
