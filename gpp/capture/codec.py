"""Conversion between torch's values and the JSON encoding of `gpp.graph.captured`.

Reading is safe: operators are looked up among the registered ones, nothing is evaluated or unpickled.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import gpp.capture.grouped  # noqa: F401  # registers the operator that `EQUIVALENT` names
from gpp.errors import CaptureError
from gpp.graph.captured import evaluate

GETITEM = "_operator.getitem"

# sympy's and torch's class names of the operations that a size can be made of
_SIZE_FUNCTIONS = {
    "Add": "add",
    "Mul": "mul",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Pow": "pow",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "Max": "max",
    "Min": "min",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "ToFloat": "float",
}


class UnknownSize(Exception):
    """A number that does not follow from the batch size alone."""


def expression_of(number: Any) -> Any:
    """Expression tree of a Python or symbolic number; the only free symbol is taken for the batch size.

    Raises:
        UnknownSize: the number depends on the data, or uses an operation that sizes cannot have.
    """
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return _tree(number.node.expr)
    if isinstance(number, torch.SymBool):
        raise UnknownSize(f"the condition {number}")
    return number


def _tree(expr: Any) -> Any:
    kind = type(expr).__name__
    if expr.is_Symbol:
        if not expr.name.startswith("s"):  # torch names data-dependent numbers u0, zuf0, ...
            raise UnknownSize(f"the data-dependent number {expr}")
        return "b"
    if expr.is_Integer:
        return int(expr)
    if kind == "Identity":
        return _tree(expr.args[0])
    if expr.is_Rational:
        return ["truediv", int(expr.p), int(expr.q)]
    if expr.is_Float:
        return float(expr)
    if kind not in _SIZE_FUNCTIONS:
        raise UnknownSize(f"the size expression {expr}")
    return [_SIZE_FUNCTIONS[kind], *(_tree(arg) for arg in expr.args)]


def encode(value: Any, reference: Callable[[Any], Any]) -> Any:
    """JSON form of an argument of a traced call; `reference` encodes the nodes in it, or the tensors of one that is no trace.

    Raises:
        UnknownSize: see `expression_of`.
        CaptureError: a value has a type without an encoding.
    """
    match value:
        case torch.fx.Node() | torch.Tensor():
            return reference(value)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return size(expression_of(value))
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [encode(part, reference) for part in (value.real, value.imag)]}
        case list() | tuple():
            return [encode(item, reference) for item in value]
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": "stage"}
        case torch.layout():
            return {"layout": str(value).removeprefix("torch.")}
        case torch.memory_format():
            return {"memory_format": str(value).removeprefix("torch.")}
    raise CaptureError(f"an argument of type {type(value).__name__} cannot be stored ({value!r})")


def size(expression: Any) -> Any:
    """Encoding of a number that is given as an expression; plain numbers stand for themselves."""
    return {"size": expression} if isinstance(expression, (list, str)) else expression


def decode(
    value: Any,
    *,
    ref: Callable[[str], Any],
    number: Callable[[Any], Any],
    device: torch.device,
    dtypes: dict[torch.dtype, torch.dtype] | None = None,
) -> Any:
    """The argument that an encoding means.

    Args:
        ref: node name -> value of the node.
        number: size expression -> its value.
        device: the device that replaces every device.
        dtypes: dtype -> the dtype that replaces it.

    Raises:
        CaptureError: the value is not an encoding.
    """
    if isinstance(value, list):
        return [decode(item, ref=ref, number=number, device=device, dtypes=dtypes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "ref":
            return ref(content)
        case "size":
            return number(content)
        case "float":
            return float(content)
        case "complex":
            return complex(*decode(content, ref=ref, number=number, device=device))
        case "device":
            return device
        case "dtype":
            dtype = dtype_of(content)
            return (dtypes or {}).get(dtype, dtype)
        case "layout":
            return _named(content, torch.layout)
        case "memory_format":
            return _named(content, torch.memory_format)
    raise CaptureError(f"unknown encoding {kind!r}; the file is damaged or from another version. Fix: capture again")


def decode_call(call: Any, ref: Callable[[str], Any], samples: int) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call (a node, a draft of one, or a step) for so many samples on the processor; `ref` as of `decode`."""
    encoded, place = [call.args, list(call.kwargs.values())], torch.device("cpu")
    args, values = decode(encoded, ref=ref, number=lambda tree: evaluate(tree, samples), device=place)
    return args, dict(zip(call.kwargs, values, strict=True))


def called(call: Any, ref: Callable[[str], Any], samples: int) -> Any:
    """What the operator of a call returns; the arguments are those of `decode_call`."""
    args, kwargs = decode_call(call, ref, samples)
    return operator_of(call.target)(*args, **kwargs)


def sizes_of(node: Any, samples: int) -> list[int]:
    """The shape of a node, or of a draft of one, for so many samples."""
    return [int(evaluate(extent, samples)) for extent in node.shape or ()]


def empty_of(node: Any, samples: int = 1) -> torch.Tensor:
    """A tensor of the form of a node, or of a draft of one, for so many samples on the processor."""
    return torch.empty(sizes_of(node, samples), dtype=dtype_of(node.dtype or "float32"), device="cpu")


def _named(name: str, kind: type) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, kind):
        raise CaptureError(f"{name!r} is not a {kind.__name__}")
    return value


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name such as `float32`."""
    return _named(name, torch.dtype)


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Build and call modules under a default floating-point type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


EQUIVALENT = {"transformers.grouped_mm_fallback.default": "gpp.grouped_mm.default"}
"""Operators that other libraries register, for which workers would have to import these -> the same of torch or of this project."""


def stored_name(operator: torch._ops.OpOverload) -> str:
    """The target under which an operator is stored: `namespace.name.overload`."""
    return EQUIVALENT.get(str(operator), str(operator))


def operator_of(target: str) -> Callable[..., Any]:
    """The operator of a stored target: `_operator.getitem` or a registered `namespace.name.overload`.

    Raises:
        CaptureError: no such operator is registered in this process.
    """
    if target == GETITEM:
        return operator.getitem
    parts = target.split(".")
    if len(parts) == 3 and all(re.fullmatch(r"[A-Za-z_]\w*", part) for part in parts):
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        found = getattr(packet, parts[2], None)
        if isinstance(found, torch._ops.OpOverload):
            return found
    fix = "import the package that defines it, or use the torch version that captured it"
    raise CaptureError(f"operator {target} is not registered in this process. Fix: {fix}")


def writes(target: Callable[..., Any]) -> bool:
    """Whether an operator writes into one of its arguments, by its schema (metadata-only writes do not count)."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and target._schema.name != "aten::detach_"


def bound_arguments(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Mapping[str | int, Any]:
    """Arguments of a call by the names of the operator's schema, defaults included."""
    if not isinstance(target, torch._ops.OpOverload):
        return dict(enumerate(args))
    out = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            out[argument.name] = args[position]
        else:
            out[argument.name] = kwargs.get(argument.name, argument.default_value)
    return out


def is_random(target: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; dropout that is switched off does not."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    given = bound_arguments(target, args, kwargs)
    if given.get("train", True) is False:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False  # the p of a norm or of a distance is none of a dropout
    chances = [given.get(name) for name in ("dropout_p", "dropout", "p")]
    return not any(isinstance(chance, int | float) and chance <= 0 for chance in chances)
