"""What a trace of torch's cannot follow: in a form that it can (`.data`, torch's own checks of values), or refused by its line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn

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


UNTRACED: tuple[tuple[Any, str, str], ...] = (
    (
        _VF,
        "_pack_padded_sequence",
        "has as many rows as the lengths say, and workers need sizes that no value decides. Fix: give the recurrent module the "
        "padded tensor, and take what it makes of each last item, by gather at lengths - 1; padding behind a sequence changes "
        "nothing before it, unless the module is bidirectional",
    ),
    (
        torch,
        "ctc_loss",
        "keeps a table for its backward whose size the lengths decide, and workers need sizes that no value decides. Fix: make "
        "both of its passes one operator of your own (torch.library.custom_op around torch.ops.aten._ctc_loss and "
        "_ctc_loss_backward), whose results are the losses and their gradient, and multiply the gradient in its register_autograd",
    ),
)
"""Functions of torch's that no trace can follow: where each is looked up by all of its callers, its name, and what to say."""


@contextmanager
def refused() -> Iterator[None]:
    """Refuse what has sizes that values decide, with the user's line, before torch says so in words of its own."""

    def refuse(name: str, rule: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise CaptureError(f"{name} at {where(traceback.extract_stack())} {rule}")

        return call

    with ExitStack() as stack:
        for holder, name, rule in UNTRACED:
            stack.enter_context(mock.patch.object(holder, name, refuse(name.lstrip("_"), rule)))
        yield


@contextmanager
def as_trained(whole: nn.Module) -> Iterator[None]:
    """Refuse code of `forward` that freezes a parameter, or trains one that was frozen: a trace does not see it."""
    plain: Any = Tensor.requires_grad_
    own: Any = Tensor.requires_grad

    def check(tensor: Tensor, value: bool) -> None:
        name = next((name for name, each in whole.named_parameters() if each is tensor), None)
        if name is not None and own.__get__(tensor) != value:
            raise CaptureError(
                f"forward sets requires_grad of {name.removeprefix('model.')} to {value} at {where(traceback.extract_stack())}; "
                "workers train the same parameters in every pass. Fix: set it before the model is captured; for one pass without "
                "gradients of a module's weights, call it by torch.func.functional_call with detached ones"
            )

    def method(self: Tensor, requires_grad: bool = True) -> Tensor:
        check(self, requires_grad)
        return plain(self, requires_grad)

    def write(self: Tensor, value: bool) -> None:
        check(self, value)
        own.__set__(self, value)

    Tensor.requires_grad = property(own.__get__, write)  # type: ignore[misc, assignment]  # which it has of a class of C
    try:
        with mock.patch.object(Tensor, "requires_grad_", method):
            yield
    finally:
        del Tensor.requires_grad
