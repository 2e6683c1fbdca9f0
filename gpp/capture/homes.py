"""Operators that are not torch's own: which module registers each, so that another process can have it too.

A worker runs the captured operators without the user's code. An operator exists only where it has been registered, so the
node that calls it names the module that does so (`Node.home`), and a process imports that before it runs the node.

A module that has what registered the operator in a variable (what `custom_op` returns, or a `Library`) does so when it is imported.
Where none has, or the user names modules, a fresh process tries them and that of the operator's code (`gpp.capture.registering`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import torch
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS

from gpp.capture.registering import registered, tried
from gpp.capture.user_lines import REGISTER
from gpp.errors import CaptureError
from gpp.graph.captured import Captured

_TORCHS_OWN = re.compile(r"(^|/)(aten/src|torch/csrc|pytorch/build|torch/_\w+|torch/[\w/]+\.py)")
"""Places in torch's sources at which its own operators are registered, as the dispatcher tells them."""

_FOR_OTHERS = re.compile(r"/torch/(library|_library/\w+)\.py$")
"""Files of torch that register the operators of whoever calls them."""


def home_of(operator: torch._ops.OpOverload, where: str, imports: tuple[str, ...] = ()) -> str:
    """The module that registers an operator when it is imported; empty for torch's own.

    Args:
        where: the user's line, for the message.
        imports: modules that may do so, as the user says.

    Raises:
        CaptureError: no other process can import it.
    """
    name = operator._schema.name
    if operator.namespace in ("aten", "prim", "prims"):
        return ""
    made = OPDEFS.get(name)
    place = "" if made is not None else _place(name)
    if place and not place.endswith(".py") and operator.namespace in sys.modules:
        return operator.namespace  # compiled ones come with the package that is called as they are, as torchvision's do
    home = made._init_fn.__module__ if made is not None else _of_place(place)
    if home is None or home.split(".")[0] == "torch":
        return ""
    at_import = made is None or "<locals>" not in made._init_fn.__qualname__
    if at_import and not imports and (holder := _holder(name, made, home)):
        return holder
    candidates = imports if home in ("", "__main__") else (home, *imports)
    asked = tuple(dict.fromkeys(candidates))
    found = tried(asked) if asked else None
    full = f"{name}.{operator._overloadname}" if operator._overloadname != "default" else name
    if found is not None and full in found.modules:
        return found.modules[full]
    what = {"": "by a module that is not known", "__main__": "in the program that was started (__main__)"}.get(home, f"by {home}")
    why = "and no worker process could import that"
    if found is not None:
        tried.cache_clear()  # the user may correct it
        said = "".join(f"; {module}: {error}" for module, error in found.failed.items())
        why = f"but not when a fresh process imports {' and '.join(asked)}{said}"
    raise CaptureError(f"{name} at {where} is registered {what}, {why}. Fix: {REGISTER}")


def import_homes(captured: Captured) -> None:
    """Register the operators that a captured model calls, where they are not torch's own.

    Raises:
        CaptureError: a module that registers one cannot be imported here, or does not register it.
    """
    homes = {node.target: node.home for node in captured.nodes if node.home}
    for home, target in sorted({home: target for target, home in homes.items()}.items()):
        try:
            importlib.import_module(home)
        except Exception as error:
            raise CaptureError(
                f"operator {target} is registered by {home}, which cannot be imported here: {type(error).__name__}: {error}. "
                "Fix: install it, or put its folder on PYTHONPATH"
            ) from error
    here = registered()
    for target, home in homes.items():
        if target.removesuffix(".default").replace(".", "::", 1) not in here:
            raise CaptureError(f"operator {target} is not registered by importing {home}. Fix: {REGISTER}")


def _holder(name: str, made: object, home: str) -> str:
    """A module with a variable that registered an operator, the module of its code first; empty if there is none."""
    for module in (home, *sys.modules):
        values = list(getattr(sys.modules.get(module), "__dict__", {}).values())
        libraries = [value for value in values if type(value) is torch.library.Library and name in value._op_defs]
        if (any(value is made for value in values) if made is not None else libraries) and _exists(module):
            return module
    return ""


def _place(name: str) -> str:
    """The file in which an operator was registered, or its kernel for tensors without data where torch does that for all."""
    found = re.search(r"^debug: registered at (.+):\d+$", torch._C._dispatch_dump(name), re.M)
    place = found[1] if found else ""
    if _FOR_OTHERS.search(place):
        entry = simple_registry.singleton.get(name)
        kernel = entry.fake_impl.kernel if entry else None
        return kernel.source.rpartition(":")[0] if kernel else ""
    return place


def _of_place(place: str) -> str | None:
    """The module at a place of registration; None for torch itself, empty where it is not known."""
    if place.endswith(".py"):
        file = Path(place).resolve()
        modules = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
        return next((name for name, other in modules if other and Path(other).resolve() == file), "")
    return None if _TORCHS_OWN.search(place) else ""


def _exists(module: str) -> bool:
    """Whether another process finds a module of this name."""
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
