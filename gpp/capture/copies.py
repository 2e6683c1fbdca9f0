"""Passes in a narrower type than that of the weights (`Captured.passes`): how a mechanism makes them, and copies of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gpp.capture.codec import dtype_of
from gpp.mechanism import found


class AbstractPasses(ABC):
    """Forwards that compute in a narrower type than that of the weights, where torch's rules have it so."""

    @abstractmethod
    def context(self, kind: str, passes: str) -> AbstractContextManager[object]:
        """The context of such a forward, on devices of a kind; `passes` is the type."""

    @abstractmethod
    def casts_itself(self, target: str) -> bool:
        """Whether an operator's own rule casts its arguments, on devices of every kind."""


def narrowing() -> AbstractPasses:
    """What narrows forwards."""
    return next(iter(found("passes", "PASSES", AbstractPasses).values()))


def casting(kind: str, passes: str | None) -> AbstractContextManager[object]:
    """The context of forwards on devices of a kind that cast to a type (`Captured.passes`); None: they cast nothing."""
    if passes is None:
        return nullcontext()
    return narrowing().context(kind, passes)


class NarrowCopies:
    """Copies of a stage's weights in the type of its passes: one of each, from one update to the next.

    Operators that cast what they read would make one in every pass, and autograd would keep it for each micro-batch in flight.
    """

    def __init__(self, passes: str | None) -> None:
        self._passes = passes or ""
        self._made: dict[str, tuple[Tensor, Tensor]] = {}

    def forget(self, written: Iterable[Tensor] | None = None) -> None:
        """Let go of those of weights that have been written.

        Args:
            written: these weights, or others of their memory; None: all of them may have been.
        """
        if not self._made:
            return
        places = None if written is None else {tensor.data_ptr() for tensor in written}
        for name, (weight, _) in tuple(self._made.items()):
            if places is None or weight.data_ptr() in places:
                del self._made[name]

    def of(self, name: str, weight: Tensor) -> Tensor:
        """The copy of the weight that has a full name now."""
        made = self._made.get(name)
        if made is None or made[0] is not weight:
            # The old one goes before the new one comes.
            self._made.pop(name, None)
            del made
            self._made[name] = weight, narrow_copy(weight, self._passes)
        return self._made[name][1]


def narrow_copy(weight: Tensor, passes: str) -> Tensor:
    """A copy of a weight in another type, whose gradient is added to the weight's.

    It is a leaf: a node of autograd's that was there before a pass is run behind all nodes of the pass, and the gradients of all
    copies would wait for it.
    """
    copy = weight.detach().to(dtype_of(passes))
    if weight.requires_grad:
        copy.requires_grad_().register_post_accumulate_grad_hook(lambda own: _hand_over(own, weight))
    return copy


def _hand_over(copy: Tensor, weight: Tensor) -> None:
    """Add the gradient of a copy to that of its weight, as autograd does behind a cast."""
    assert copy.grad is not None
    gradient, copy.grad = copy.grad.to(weight.dtype), None
    if weight.grad is None or getattr(weight, "_post_accumulate_grad_hooks", None):
        torch.autograd.backward([weight], [gradient])
    else:
        weight.grad.add_(gradient)
