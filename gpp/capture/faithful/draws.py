"""Random numbers of a module, given to another run of the same draws.

A run may draw numbers that it does not use, and a graph leaves these out. So each draw of the second run begins with the state of
the generator that the same draw of the first run began with.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gpp.capture.codec import is_random


class Draws(TorchDispatchMode):
    """Keeps the generator's state before every draw, with the operator and the shapes that it was asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.states: list[tuple[tuple[Any, ...], Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, list(args), kwargs):
            self.draw(_key(func, args, kwargs))
        return func(*args, **kwargs)

    def draw(self, key: tuple[Any, ...]) -> None:
        """A draw is next."""
        self.states.append((key, _state(self.device)))


class Replayed(Draws):
    """Draws from the states that an earlier run had.

    Args:
        earlier: the first run; of its draws those are taken that this run makes, too, in order.
    """

    def __init__(self, earlier: Draws) -> None:
        super().__init__(earlier.device)
        self._left = list(earlier.states)

    def draw(self, key: tuple[Any, ...]) -> None:
        super().draw(key)
        for number, (other, state) in enumerate(self._left):
            if other == key:
                del self._left[: number + 1]
                _set_state(self.device, state)
                return

    def unlike(self, earlier: Draws) -> str | None:
        """An operator that drew more often in the earlier run, so that the numbers here may be another draw's; None if none did."""
        own, other = (Counter(key for key, _ in draws.states) for draws in (self, earlier))
        return next((str(key[0]) for key in own if own[key] != other[key]), None)


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    values = tree_flatten((args, kwargs))[0]
    return (str(func), *((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v) for v in values))


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
