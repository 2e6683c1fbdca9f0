"""What a trace of torch's cannot follow, in a form that it can: `.data`, and torch's own checks of values."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gpp.capture.user_lines import is_users, where
from gpp.errors import CaptureError


@contextmanager
def data_detached() -> Iterator[None]:
    """Let the user's `tensor.data` be `tensor.detach()`, and `tensor.data = value` write the value in place.

    A trace takes `.data` for a new tensor without values.
    """
    own: Any = Tensor.data

    def read(self: Tensor) -> Tensor:
        return self.detach() if is_users(sys._getframe(1).f_code.co_filename) else own.__get__(self)

    def write(self: Tensor, value: Tensor) -> None:
        if not is_users(sys._getframe(1).f_code.co_filename):
            own.__set__(self, value)
            return
        if (self.shape, self.dtype) != (value.shape, value.dtype):
            line = where(traceback.extract_stack())
            raise CaptureError(f"a tensor gets data of another shape or type at {line}, which workers cannot do. Fix: keep both")
        with torch.no_grad():
            self.copy_(value)

    Tensor.data = property(read, write)  # type: ignore[misc, assignment]  # which it has of a class of C
    try:
        yield
    finally:
        del Tensor.data


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out what torch checks of values: the parameters of a distribution, and that a variance is not negative.

    These checks compute nothing; they raise errors.
    """
    own = F.gaussian_nll_loss

    def without_check(*args: Any, **kwargs: Any) -> Tensor:
        with mock.patch.object(torch, "any", lambda *_: False):
            return own(*args, **kwargs)

    with ExitStack() as stack:
        if distributions := sys.modules.get("torch.distributions"):
            stack.enter_context(mock.patch.object(distributions.Distribution, "_validate_args", False))
        stack.enter_context(mock.patch.object(F, "gaussian_nll_loss", without_check))
        yield
