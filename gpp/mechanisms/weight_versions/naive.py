"""Naive: every pass uses whatever is there. A control: forward and backward of a micro-batch disagree."""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy, Backward
from gpp.settings import settings


@final
@settings("strategy.weights")
class Naive(AbstractVersionPolicy):
    """The latest weights in forward and backward, which are different ones: the gradient is that of no function."""

    repeats: ClassVar[bool] = False

    @property
    def backward(self) -> Backward:
        return "current"
