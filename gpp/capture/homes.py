"""Operators that are not torch's own: which module registers each, so that another process can have it too.

A worker runs the captured operators without the user's code. An operator exists only where it has been registered, so the
node that calls it names the module that does so (`Node.home`), and a process imports that before it runs the node.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import torch
from torch._library.custom_ops import OPDEFS

from gpp.errors import CaptureError
from gpp.graph.captured import Captured

_TORCHS_OWN = re.compile(r"(^|/)(aten/src|torch/csrc|pytorch/build|torch/_\w+|torch/[\w/]+\.py)")
"""Places in torch's sources at which its own operators are registered, as the dispatcher tells them."""


def home_of(operator: torch._ops.OpOverload, where: str) -> str:
    """The module that registers an operator when it is imported; empty for torch's own.

    Args:
        where: the user's line, for the message.

    Raises:
        CaptureError: no other process can import it.
    """
    name = operator._schema.name
    if operator.namespace in ("aten", "prim", "prims"):
        return ""
    made = OPDEFS.get(name)
    home = made._init_fn.__module__ if made is not None else _of_place(operator.namespace, _place(name))
    if home is None or home.split(".")[0] == "torch":
        return ""
    fix = "register it in a module of its own, which the model's module imports"
    if home in ("", "__main__"):
        what = "in the program that was started (__main__)" if home else "by a module that is not known"
        raise CaptureError(f"{name} at {where} is registered {what}, and no worker process could import that. Fix: {fix}")
    if not _exists(home):
        raise CaptureError(f"{name} at {where} is registered by {home}, which no worker process could import. Fix: {fix}")
    return home


def import_homes(captured: Captured) -> None:
    """Register the operators that a captured model calls, where they are not torch's own.

    Raises:
        CaptureError: a module that registers one cannot be imported here.
    """
    for home, target in sorted({node.home: node.target for node in captured.nodes if node.home}.items()):
        try:
            importlib.import_module(home)
        except Exception as error:
            raise CaptureError(
                f"operator {target} is registered by {home}, which cannot be imported here: {type(error).__name__}: {error}. "
                "Fix: install it, or put its folder on PYTHONPATH"
            ) from error


def _place(name: str) -> str:
    """The file in which an operator was registered, as the dispatcher has noted it."""
    found = re.search(r"^debug: registered at (.+):\d+$", torch._C._dispatch_dump(name), re.M)
    return found[1] if found else ""


def _of_place(namespace: str, place: str) -> str | None:
    """The module at a place of registration; None for torch itself, empty where it is not known."""
    if place.endswith(".py"):
        file = Path(place).resolve()
        modules = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
        return next((name for name, other in modules if other and Path(other).resolve() == file), "")
    # Compiled ones come with the package that is called as they are, as torchvision's do.
    if namespace in sys.modules:
        return namespace
    return None if _TORCHS_OWN.search(place) else ""


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
