"""The type in which forwards compute, where it is narrower than that of the weights: a mechanism's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from gpp.mechanism import found


class AbstractPasses(ABC):
    """Forwards that compute in a narrower type where torch's rules have it so."""

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
