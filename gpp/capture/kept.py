"""Everything that a run of a user's modules may change, kept so that changes can be seen and undone."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_TORCHS = frozenset(vars(nn.Module()))
"""Attributes that every module has of torch: parameters, buffers, hooks, the mode."""


class Change(NamedTuple):
    """An attribute that is no longer what it was, by the path of its module."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path} ({_shown(self.before)} before, {_shown(self.after)} after)"


class Missing:
    """Stands for an attribute that was not there."""


class KeptModules:
    """Modules as they are now: their attributes and modes, and if asked the values and gradients of their tensors.

    Containers (lists, dicts and the like) are kept with what they hold, and no deeper; so are the states of all random generators.

    Args:
        values: whether to copy all tensors.
    """

    def __init__(self, root: nn.Module, *, values: bool) -> None:
        self._modules = dict(root.named_modules())
        self._vars = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._held = {
            path: {name: value.copy() for name, value in found.items() if type(value) in _CONTAINERS}
            for path, found in self._vars.items()
        }
        self.values: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        if values:
            for tensor in self._tensors():
                if id(tensor) not in self.values:
                    self.values[id(tensor)] = tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None
        self._random = random_states()

    def _tensors(self) -> Iterator[Tensor]:
        for found in self._vars.values():
            for value in (*found["_parameters"].values(), *found["_buffers"].values(), *found.values()):
                if isinstance(value, Tensor) and not value.is_meta:
                    yield value

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor as it was."""
        return self.values[id(tensor)][1]

    def changes(self) -> list[Change]:
        """The attributes of the user's own that are others now, or that hold others."""
        return [
            Change(".".join(part for part in (path, name) if part), before, after)
            for path, module in self._modules.items()
            for name, before, after in self._changed(path, vars(module))
        ]

    def changed(self, path: str) -> bool:
        """Whether the attribute at `path` is another object now."""
        return any(change.path == path for change in self.changes())

    def _changed(self, path: str, now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        kept, held = self._vars[path], self._held[path]
        for name in dict.fromkeys((*kept, *now)):
            if name in _TORCHS:
                continue
            before, after = kept.get(name, Missing), now.get(name, Missing)
            if name in held and before is after:
                before = held[name]
                if not _same(before, after):
                    yield name, before, after
            elif isinstance(before, Tensor) and before is after:
                if id(before) in self.values and after.layout == torch.strided and not torch.equal(self.value(before), after):
                    yield name, self.value(before), after
            elif not _same(before, after):
                yield name, before, after

    def put_back(self) -> None:
        """Undo all that has changed."""
        for path, module in self._modules.items():
            kept, now = self._vars[path], vars(module)
            for name in [name for name in now if name not in kept]:
                del now[name]
            for name, value in kept.items():
                if now.get(name, Missing) is not value:
                    now[name] = value
            for name, held in self._held[path].items():
                if not _same(held, container := kept[name]):
                    container.clear()
                    (container.update if hasattr(container, "update") else container.extend)(held)
        with torch.no_grad():
            for tensor, value, gradient in self.values.values():
                if tensor.layout == torch.strided and not torch.equal(tensor, value):
                    tensor.data.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = gradient
        restore_random(self._random)


def random_states() -> dict[str, Any]:
    """The states of the random generators of Python, numpy (where it is in use) and torch, by name."""
    states: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Put the generators back to such states."""
    random.setstate(states["random"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_all(seed: int) -> None:
    """Begin all generators anew."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def advanced(before: dict[str, Any]) -> tuple[str, ...]:
    """Which of Python's and numpy's generators have drawn since `before`."""
    now = random_states()
    found = ["random"] if now["random"] != before["random"] else []
    if "numpy" in now and "numpy" in before:
        found += ["numpy"] if (now["numpy"][2:] != before["numpy"][2:] or (now["numpy"][1] != before["numpy"][1]).any()) else []
    return tuple(found)


def _same(before: Any, after: Any) -> bool:
    """Whether two values are one object, equal plain values, or containers of such."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, _PLAIN):
        return before == after
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            value is after[key] or _same(value, after[key]) for key, value in before.items()
        )
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(after) and all(map(_same, before, after))
    return before == after if isinstance(before, (set, torch.Size, torch.dtype, torch.device)) else False


def _shown(value: Any) -> str:
    if value is Missing:
        return "nothing"
    if isinstance(value, Tensor):
        return f"{float(value):.4g}" if value.numel() == 1 else f"a tensor {list(value.shape)}"
    if isinstance(value, _PLAIN):
        return repr(value)[:40]
    return f"{len(value)} entries" if hasattr(value, "__len__") else f"a {type(value).__name__}"
