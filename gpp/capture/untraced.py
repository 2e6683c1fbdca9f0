"""What a trace of torch's cannot follow: in a form that it can (`.data`, torch's own checks of values), or refused by its line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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


@contextmanager
def gathered() -> Iterator[None]:
    """Let `take_along_dim` be the gather that it stands for: torch's own makes a constant of the number of samples."""
    own = torch.take_along_dim

    def take(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
        if dim is None:
            return own(input, indices)
        at = dim % input.dim()
        before, behind = (
            torch.broadcast_shapes(input.shape[part], indices.shape[part]) for part in (slice(at), slice(at + 1, None))
        )
        given, places = (each.expand(*before, each.shape[at], *behind) for each in (input, indices))
        return given.gather(at, places)

    with mock.patch.object(torch, "take_along_dim", take), mock.patch.object(Tensor, "take_along_dim", take):
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


@contextmanager
def in_place(whole: nn.Module) -> Iterator[None]:
    """Let a module that assigns another tensor to one of its buffers write it there: torch.export loses what is assigned.

    It is written when the module's forward ends, so that what the forward computes from either tensor is not touched.
    """
    # Where a module has two names, torch calls a proxy of each module, which shares its dictionaries.
    own = {id(module._buffers) for module in whole.modules()}
    before: dict[int, dict[str, Tensor | None]] = {}

    def note(module: nn.Module, args: Any) -> None:
        if id(module._buffers) in own:
            before[id(module._buffers)] = dict(module._buffers)

    def write(module: nn.Module, args: Any, output: Any) -> None:
        for name, old in before.pop(id(module._buffers), {}).items():
            new = module._buffers.get(name)
            if old is None or new is None or new is old or (old.shape, old.dtype) != (new.shape, new.dtype):
                continue
            old.copy_(new.detach())
            module._buffers[name] = old

    handles = nn.modules.module.register_module_forward_pre_hook(note), nn.modules.module.register_module_forward_hook(write)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_MAKERS = frozenset((torch.tensor, torch.as_tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace))
"""Functions that make a tensor of numbers."""


class KnownValues(TorchFunctionMode):
    """Compute what follows from numbers of Python alone while a model is traced, so that its code may look at it.

    Models of pictures of several sizes walk over a list of grids, and cut and order patches by it. `torch.export` knows the sizes
    of a tensor, and no values: of a tensor that is made of numbers (`torch.tensor(grid)`, `torch.arange(h * w)`) it forgets them
    at once. Here such a tensor has its values, is a constant of what is captured, and so is what functions make of it. A function
    with another tensor among its arguments is traced, and so is one that draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Tensor] = {}  # by id; they are kept, so that no id has two meanings

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, leaves = dict(kwargs or {}), tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        symbols = any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves)
        known = all(id(tensor) in self._known for tensor in tensors) and not symbols
        if not known or not (tensors or func in _MAKERS):
            return func(*args, **named)
        with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
            before = torch.get_rng_state()
            found = func(*args, **named)
            drawn = not torch.equal(before, torch.get_rng_state())
        if drawn:
            torch.set_rng_state(before)
            return func(*args, **named)
        self._known |= {id(leaf): leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}
        return found
