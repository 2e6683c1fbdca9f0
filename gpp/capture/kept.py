"""Everything that a run of a user's modules may change, kept so that changes can be seen and undone."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpp.capture.python_state import PLAIN, Generator, HeldPlace, Missing, PythonState


class Change(NamedTuple):
    """Something that a model's code reaches and that is no longer what it was.

    Args:
        draws: whether it is a random generator of the user's own.
        written: whether it is a tensor that was changed in place.
    """

    path: str
    before: Any
    after: Any
    draws: bool = False
    written: bool = False

    def __str__(self) -> str:
        what = self.path if self.path.startswith("the ") else f"the attribute {self.path}"
        return f"{what} ({shown(self.before)} before, {shown(self.after)} after)"


class KeptModules:
    """Modules as they are now, with all that their code reaches in Python, and if asked the values and gradients of their tensors.

    The states of all random generators are kept, too.

    Args:
        roots: modules and functions, each with the beginning of its paths.
        values: whether to copy all tensors.
    """

    def __init__(self, roots: Mapping[str, Any], *, values: bool) -> None:
        self.state = PythonState(roots)
        self.values: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._beside: list[tuple[str, Tensor]] = []
        if values:
            for path, tensor in self.state.tensors.values():
                if not tensor.is_meta:
                    self.values[id(tensor)] = tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None
                    self._beside += [(path, tensor)] if id(tensor) not in self.state.registered else []
        self._places: dict[str, HeldPlace] = {}
        self._random = random_states()

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor as it was."""
        return self.values[id(tensor)][1]

    def changes(self) -> list[Change]:
        """What is another now, or holds others: attributes, variables, and tensors that are no parameters or buffers."""
        found = []
        for place in self.state.places:
            for path, before, after in place.changes():
                self._places[path] = place
                found.append(Change(path, before, after, isinstance(place, Generator)))
        written = [Change(path, self.value(one), one, written=True) for path, one in self._beside if self._written(one)]
        return [*found, *written]

    def _written(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and not torch.equal(self.value(tensor), tensor)

    def changed(self, path: str) -> bool:
        """Whether what `changes` has found at `path` is another object now."""
        if place := self._places.get(path):
            return any(found == path for found, _, _ in place.changes())
        return any(found == path and self._written(tensor) for found, tensor in self._beside)

    def reseed(self, seed: int) -> None:
        """Begin the generators of the user's own anew."""
        for place in self.state.places:
            if isinstance(place, Generator):
                place.reseed(seed)

    def put_back(self) -> None:
        """Undo all that has changed."""
        self.state.put_back()
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
    torch.manual_seed(seed)
    seed_python(seed)


def seed_python(seed: int) -> None:
    """Begin those of Python and numpy anew."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def advanced(before: dict[str, Any]) -> tuple[str, ...]:
    """Which of Python's and numpy's generators have drawn since `before`."""
    now = random_states()
    found = ["random"] if now["random"] != before["random"] else []
    if "numpy" in now and "numpy" in before:
        found += ["numpy"] if (now["numpy"][2:] != before["numpy"][2:] or (now["numpy"][1] != before["numpy"][1]).any()) else []
    return tuple(found)


def shown(value: Any) -> str:
    """A value in a few words."""
    if value is Missing:
        return "nothing"
    if isinstance(value, Tensor):
        return f"{float(value):.4g}" if value.numel() == 1 else f"a tensor {list(value.shape)}"
    if isinstance(value, PLAIN):
        return repr(value)[:40]
    return f"{len(value)} entries" if hasattr(value, "__len__") else f"a {type(value).__name__}"
