"""Choosing among the outputs of a library's network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gpp.errors import InvalidConfig
from gpp.models.dotted import nearest


def keep_outputs(network: nn.Module, names: Sequence[str]) -> nn.Module:
    """The same network, returning a dict of the named fields [B, ...] only.

    This is a hook rather than a wrapper module, so that parameters and operators keep their author's names.
    """

    def keep(_module: nn.Module, _inputs: Any, outputs: Any) -> dict[str, Tensor]:
        return {name: _field(outputs, name) for name in names}

    network.register_forward_hook(keep)
    return network


def _field(outputs: Any, name: str) -> Tensor:
    known = list(outputs.keys()) if hasattr(outputs, "keys") else [known for known in dir(outputs) if not known.startswith("_")]
    if name not in known:
        raise InvalidConfig("model.outputs", name, f"{type(outputs).__name__} has no such field", nearest(name, known))
    return outputs[name] if hasattr(outputs, "keys") else getattr(outputs, name)
