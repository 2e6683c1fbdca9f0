"""Forwards under `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gpp.capture.codec import dtype_of, operator_of
from gpp.capture.copies import AbstractPasses


class AutocastPasses(AbstractPasses):
    """PyTorch's own rules say which operators cast.

    Without its cache of cast weights, which does not see updates: `gpp.capture.copies` is one that is told of them.
    """

    def context(self, kind: str, passes: str) -> AbstractContextManager[object]:
        return torch.autocast(kind, dtype_of(passes), cache_enabled=False)

    def casts_itself(self, target: str) -> bool:
        """The parts of other operators do so inside: what these are given, they look at first."""
        operator = operator_of(target)
        if not isinstance(operator, torch._ops.OpOverload):
            return False
        return all(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in ("AutocastCPU", "AutocastCUDA"))


PASSES = AutocastPasses()
