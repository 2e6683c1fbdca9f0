"""Calls of torch that never reach its operators, and that a card answers in another way than main memory does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch.overrides import TorchFunctionMode

from tests.support.cards.faults import Misuse
from tests.support.cards.kernels import DEVICE
from tests.support.cards.memory import use_on_host

if TYPE_CHECKING:
    from tests.support.cards.card import ModelCard

_MAIN = torch.device("cpu")
_GROUPING = ("torch/nn/utils/clip_grad.py",)
"""Files of torch that group tensors by their devices in C++, where tensors on the card have devices without a number."""


@final
class Calls(TorchFunctionMode):
    """Answers for a card in the thread of a worker."""

    def __init__(self, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        self.current: tuple[Any, Any, Any] | None = None
        """The call under way that the program has made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        before, self.current = self.current, (func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.current = before

    def factory_on_card(self) -> bool:
        """Whether memory that torch makes by itself, on a device without a number, is for tensors on the card."""
        if self.current is None:
            return True  # autograd's own
        _, args, kwargs = self.current
        return any(self.lies_on_card(one) for one in _flat((*args, *kwargs.values())))

    def lies_on_card(self, value: object) -> bool:
        block = self.card.blocks.find(value) if isinstance(value, torch.Tensor) else None
        return block is not None and not block.pinned

    def look(self, tensor: torch.Tensor) -> None:
        """The program reads a tensor of main memory, which may be pinned."""
        block = self.card.blocks.find(tensor)
        if block is not None:
            use_on_host(self.card.host, block.memory, writes=False)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _device(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    return DEVICE if calls.lies_on_card(args[0]) else func(*args, **kwargs)


def _to(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    if not calls.lies_on_card(tensor):
        if rest and calls.lies_on_card(rest[0]):
            return func(tensor, DEVICE, rest[0].dtype, *rest[1:], **kwargs)
        return func(*args, **kwargs)
    if rest and isinstance(rest[0], torch.Tensor):
        rest = [DEVICE if calls.lies_on_card(rest[0]) else _MAIN, rest[0].dtype, *rest[1:]]
    device = kwargs.get("device", rest[0] if rest and isinstance(rest[0], torch.device | str) else None)
    if device is None:
        return func(tensor, *rest, **kwargs)
    rest = rest[1:] if rest and isinstance(rest[0], torch.device | str) else rest
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    free = kwargs.pop("non_blocking", False)
    if rest and isinstance(rest[-1], bool):
        free, rest = rest[-1], rest[:-1]
    moved = func(tensor, *rest, **kwargs) if rest or kwargs else tensor
    stays = torch.device(device) == DEVICE or sys._getframe(2).f_code.co_filename.endswith(_GROUPING)
    return moved if stays else _down(calls, moved, bool(free))


def _down(calls: Calls, tensor: torch.Tensor, free: bool = False) -> torch.Tensor:
    # A tensor without a number in its device lies in main memory, so that the copy is one to main memory.
    calls.current, before = (torch.empty_strided, (), {}), calls.current
    try:
        strides = torch.empty_like(tensor, device="meta").stride()
        target = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=_MAIN)
    finally:
        calls.current = before
    return target.copy_(tensor, non_blocking=free)


def _cpu(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    return _down(calls, args[0]) if calls.lies_on_card(args[0]) else func(*args, **kwargs)


def _via_main(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    if calls.lies_on_card(args[0]):
        args = (_down(calls, args[0]), *args[1:])
    calls.look(args[0])
    return func(*args, **kwargs)


def _refused(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    if calls.lies_on_card(args[0]):
        raise Misuse(f"{func.__name__} of a tensor that lies on a card; copy it to main memory first: tensor.cpu()")
    calls.look(args[0])
    return func(*args, **kwargs)


def _from_values(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device) != DEVICE:
        return func(*args, **kwargs)
    wants = kwargs.pop("requires_grad", False)
    made = func(*args, **{**kwargs, "device": _MAIN})
    with torch.no_grad():
        made = made.to(DEVICE)
    return made.requires_grad_() if wants else made


def _deepcopy(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, memo = args
    if not calls.lies_on_card(tensor):
        return func(*args, **kwargs)
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copied = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    else:
        copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _hook(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    """Autograd calls hooks without modes; theirs are calls of the program, too."""
    tensor, hook = args

    def called(*values: Any) -> Any:
        with calls:
            return hook(*values)

    return func(tensor, called, **kwargs)


def _is_pinned(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    block = calls.card.blocks.find(args[0])
    return block is not None and block.pinned


def _pin(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    return calls.card.pinned(args[0])


_SPECIAL: dict[Any, Callable[[Calls, Any, Any, Any], Any]] = {
    torch.Tensor.device.__get__: _device,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.tolist: _via_main,
    torch.Tensor.numpy: _refused,
    torch.Tensor.__array__: _refused,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.register_hook: _hook,
    torch.Tensor.register_post_accumulate_grad_hook: _hook,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.tensor: _from_values,
    torch.as_tensor: _from_values,
    torch.asarray: _from_values,
}
