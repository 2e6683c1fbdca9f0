"""What a step of the user's module does beside computing numbers: the lines that change something, hooks, and seeds."""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from gpp.capture.user_lines import is_users, where


def line_of(run: Callable[[], Any], changed: Callable[[], bool]) -> str | None:
    """`file:line: source` of the user's line after which `changed` is first true, while `run` runs; None if it never is.

    Every line of the user's code is followed, which takes long: it is for what is known to be changed.
    """
    here: tuple[str, int] | None = None
    found: list[tuple[str, int]] = []

    def look() -> None:
        if not found and here is not None and changed():
            found.append(here)

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal here
        look()
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
        elif event == "return" and (caller := frame.f_back) is not None and is_users(caller.f_code.co_filename):
            here = caller.f_code.co_filename, caller.f_lineno
        return None if found else follow

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return follow if not found and is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    if not found:
        look()
    return f"{found[0][0]}:{found[0][1]}: {linecache.getline(*found[0]).strip()}" if found else None


@contextlib.contextmanager
def hooked_lines() -> Iterator[list[str]]:
    """The user's lines that give tensors hooks while this is open: torch.export leaves them out."""
    lines: list[str] = []

    def noting(name: str) -> Any:
        own = getattr(Tensor, name)

        def register(self: Tensor, hook: Any) -> Any:
            line = where(traceback.extract_stack())
            if line not in lines:
                lines.append(line)
            return own(self, hook)

        return mock.patch.object(Tensor, name, register)

    with noting("register_hook"), noting("register_post_accumulate_grad_hook"):
        yield lines


@contextlib.contextmanager
def cut_lines() -> Iterator[list[str]]:
    """The user's lines with a reentrant checkpoint whose inputs need no gradient: PyTorch gives the parameters inside none."""
    lines: list[str] = []
    own = checkpointing.check_backward_validity

    def check(inputs: Any) -> None:
        inputs = tuple(inputs)
        if not any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
            lines.append(where(traceback.extract_stack()))
        own(inputs)

    with mock.patch.object(checkpointing, "check_backward_validity", check):
        yield lines


@contextlib.contextmanager
def seeded_lines() -> Iterator[list[str]]:
    """The user's lines that set torch's seed while this is open."""
    lines: list[str] = []
    own = torch.manual_seed

    def seed(number: int) -> torch.Generator:
        if is_users(sys._getframe(1).f_code.co_filename):
            lines.append(where(traceback.extract_stack()))
        return own(number)

    with mock.patch.object(torch, "manual_seed", seed), mock.patch.object(torch.random, "manual_seed", seed):
        yield lines


def standing_hooks(model: nn.Module) -> list[str]:
    """The hooks on parameters and on the backwards of modules, each as a phrase that names it."""
    found = []
    for name, parameter in model.named_parameters():
        kinds = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}
        found += [f"the hook on the parameter {name} ({kind})" for kind, held in kinds.items() if getattr(parameter, held, None)]
    for path, module in model.named_modules():
        kinds = {"register_full_backward_hook": "_backward_hooks", "register_full_backward_pre_hook": "_backward_pre_hooks"}
        found += [f"the hook on the module {path or 'itself'} ({kind})" for kind, held in kinds.items() if getattr(module, held)]
    everywhere = (torch.nn.modules.module._global_backward_hooks, torch.nn.modules.module._global_backward_pre_hooks)
    return found + ["the hook on all modules (register_module_full_backward_hook)"] * any(everywhere)
