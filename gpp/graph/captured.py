"""A captured model as plain data: its nodes, its operator graph, and the disk cache of both.

No torch here. A worker process reads a `Captured` and cuts its stage's module from it
(`gpp.capture.stage`) without importing the user's code.

Encoding of arguments (`Node.args`, `Node.kwargs`), JSON values all of them:

    3, 0.5, true, null, "sum"      themselves (a non-finite float is {"float": "inf"})
    [..]                           list or tuple
    {"ref": "linear_1"}            the value of another node
    {"size": ["mul", 3, "b"]}      a number that follows from the batch size b
    {"dtype": "float32"}, {"layout": "strided"}, {"memory_format": "contiguous_format"}
    {"device": "stage"}            the device that the stage lives on

A block's `kwargs` hold `spec`, the JSON text of its factory's positional and keyword arguments, and
`params`, references to its parameters and buffers.

Example, `y = relu(x @ w)`: `x` (input), `w` (param), `matmul` (call, refs x and w), `relu` (call).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from gpp.graph.op_graph import OpGraph
from gpp.serialization import seal, unseal

T = TypeVar("T")

FORMAT_VERSION = 11

ITEMS = "items:"
"""Prefix of an input that is no user's: a number that a loss is divided by (`Items`)."""

LEAVES = ("param", "buffer", "constant")
"""Kinds of nodes whose tensors a stage holds."""

LOSS = "loss"
"""Result of a loss that is one scalar, and the sum of one that has terms; a term's result is `loss:NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One step of the captured computation, or one of its leaves.

    Args:
        target: operator (`aten.linear.default`), input name, full name of the parameter or buffer, or,
            for a block, the dotted path of its factory.
        shape: sizes, ints or expressions in the batch size; None where the value is a tuple of tensors.
        dtype: name without `torch.`; None where the value is a tuple.
        batch_dim: the only dimension of exactly batch size, if the other sizes are fixed; else None.
        module: path of the innermost user module; `loss` for the loss and the metrics.
        free: whether it belongs to no operator, so that every stage that needs it computes its own copy. A free node
            depends on parameters, constants and the batch size only, or prepares user inputs (masks, indices) without
            parameters and without FLOPs.
        after: in-place writers that must have run before this node reads.
        mutates: full names of the buffers and parameters that it writes.
        no_grad: whether it runs with autograd off.
        requires_grad: whether it is trainable (param), or a gradient flows back through it (call, block).
        persistent: whether it is a buffer that belongs to the state dict.
        home: of a call of an operator that is not torch's own, the module that registers it (`gpp.capture.homes`).
        narrow: parameters that it reads in the type of the passes (`Captured.passes`).
    """

    name: str
    kind: Literal["input", "param", "buffer", "constant", "call", "block"]
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Any, ...] | None = None
    dtype: str | None = None
    batch_dim: int | None = None
    module: str = ""
    free: bool = False
    after: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    no_grad: bool = False
    requires_grad: bool = False
    persistent: bool = True
    home: Annotated[str, Field(exclude_if=lambda home: not home)] = ""
    narrow: Annotated[tuple[str, ...], Field(exclude_if=lambda names: not names)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor that an operator keeps for its backward, and that follows from trained parameters alone.

    It is none of the parameters, nor a view of one: after an update it still holds the values of before.

    Args:
        node: the operator's node.
        params: full names of the parameters.
        where: the user's line.
    """

    node: str
    params: tuple[str, ...]
    where: str


WITHOUT_WEIGHTS = "its weights were not there"
"""Why a model on the meta device is not compared: one that is planned only, or that is compared when its weights are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A captured model was compared with the user's own module (`gpp.capture.faithful.compared`).

    Args:
        seconds, capture_s: what this took, and what the capture took.
        samples: of the batch that both computed.
        unknown: why they could not be compared; None where they are equal.
    """

    seconds: float
    capture_s: float
    samples: int = 0
    unknown: str | None = None


Kind = Literal["sum", "inverse", "mean", "share"]
"""How the number of a mini-batch's items follows from those of its parts: `sum` and `inverse`, it or its inverse adds up; `mean`,
it is their mean. With `share` a part is given its share of the items, beside its share of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A number that a loss is divided by, of the whole mini-batch, and which micro-batches are given with their rows.

    Args:
        name: of the input that takes it, with the prefix `items:`.
        node: the scalar node that makes it of rows; no operator needs it.
        dtype: in which it is given.
        of: the result whose share it is; empty for other kinds.
    """

    name: str
    node: str
    kind: Kind
    dtype: str
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted:
    """An operator whose FLOPs are not known, of the user's own or with more than a hundredth of the bytes that the model moves.

    Args:
        node: the node that calls it.
        operator: its name, as `aten.linalg_qr.default`.
        where: the user's line.
        share: of the bytes that the model's forward moves, those of the node.
    """

    node: str
    operator: str
    where: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model, its loss and its metrics, as nodes and as an operator graph.

    Args:
        nodes: in a topological order that is also the order of execution.
        inputs: names of the user's inputs; a target is `target:NAME`.
        results: `loss`, or `loss:NAME` for each term of a loss that has several, and `metric:NAME`, each with the node
            that makes it.
        graph: fine-grained operators; `Op.nodes` are node names, and free nodes are in none of them
            (except in-place updates of buffers, which belong to the operator of their module).
        constants: values of tensors that the code holds outside of parameters and buffers, as base64
            of their bytes; None where the value has to come from the model (`initial_state`).
        batch: None if any batch size runs, else the only one that does.
        aliases: other names of tied parameters and buffers, each with the name that counts.
        warnings: messages for the user, one line each.
        loss_ops: names of the operators that make up the loss function; none lies before an operator of the network.
        coupled: whether the loss of a batch differs from the mean of the losses of its parts; None where it is unknown.
        summed: whether it, or a term of it, is the sum of those of its parts.
        derived: tensors kept for a backward that are computed from parameters alone.
        mixes: whether the network computes a sample by the others of its batch; None where it is unknown, or the loss is coupled.
        checked: how it was compared with the user's own module; None where that was not tried.
        items: what the losses are divided by (`gpp.capture.items`).
        uncounted: operators that a cost model which counts FLOPs has no time for (`gpp.cost.counted`).
        passes: type to which forwards cast where torch's rules have it so; nodes and graph are those of such forwards. None: they
            cast nothing.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    results: dict[str, str]
    graph: OpGraph
    constants: dict[str, str | None] = field(default_factory=dict)
    batch: int | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    loss_ops: tuple[str, ...] = ()
    coupled: bool | None = None
    summed: bool = False
    derived: tuple[Derived, ...] = ()
    mixes: bool | None = field(default=None, compare=False)
    checked: Checked | None = field(default=None, compare=False)
    items: tuple[Items, ...] = ()
    uncounted: tuple[Uncounted, ...] = ()
    passes: Annotated[Literal["bfloat16", "float16"] | None, Field(exclude_if=lambda passes: passes is None)] = None

    @cached_property
    def rows(self) -> dict[str, Node]:
        """The nodes of the user's inputs and targets by the names of their rows."""
        return {node.target: node for node in self.nodes if is_row(node)}

    @cached_property
    def node_of(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}


def is_row(node: Any) -> bool:
    """Whether a node is an input or a target of the user's, of which every sample has a row."""
    return node.kind == "input" and not node.target.startswith(ITEMS)


def is_loss(result: str) -> bool:
    """Whether a result is a loss or a term of one, which training differentiates."""
    return result == LOSS or result.startswith(f"{LOSS}:")


def loss_nodes(results: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes of the losses among `results`, each once."""
    return tuple(dict.fromkeys(node for name, node in results.items() if is_loss(name)))


def with_total(values: Mapping[str, float]) -> dict[str, float]:
    """Values of results, preceded by the sum of a loss's terms as `loss`.

    Example: `with_total({"loss:a": 1.0, "loss:b": 2.0}) == {"loss": 3.0, "loss:a": 1.0, "loss:b": 2.0}`.
    """
    terms = [value for name, value in values.items() if is_loss(name) and name != LOSS]
    return {LOSS: sum(terms), **values} if terms and LOSS not in values else dict(values)


def references(value: Any) -> Iterator[str]:
    """Names of the nodes that an encoded argument refers to, in order, repeats included."""
    if isinstance(value, dict):
        if "ref" in value:
            yield value["ref"]
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def ref(value: Any) -> str | None:
    """The name of the node that an encoded argument refers to; None for another argument."""
    return value.get("ref") if isinstance(value, dict) else None


def renamed(value: Any, names: Mapping[str, Any]) -> Any:
    """An encoded argument with other names of the nodes that it refers to; those without another one stay."""
    if isinstance(value, dict):
        return {key: names.get(content, content) if key == "ref" else renamed(content, names) for key, content in value.items()}
    return [renamed(item, names) for item in value] if isinstance(value, (list, tuple)) else value


def closure(roots: Iterable[T], after: Callable[[T], Iterable[T]]) -> set[T]:
    """The roots, and all that comes after one of them, directly or not."""
    found, todo = set[T](), list(roots)
    while todo:
        if (one := todo.pop()) not in found:
            found.add(one)
            todo += after(one)
    return found


def node_references(node: Any) -> Iterator[str]:
    """Names of the nodes whose values a node, or a draft of one, reads."""
    yield from references(node.args)
    for value in node.kwargs.values():
        yield from references(value)


OPERATIONS = {
    "add": lambda *terms: sum(terms),
    "mul": lambda *factors: math.prod(factors),
    "floordiv": lambda a, b: a // b,
    "truediv": lambda a, b: a / b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "max": max,
    "min": min,
    "float": float,
}


def evaluate(expression: Any, batch: int) -> Any:
    """The number that an expression means at a batch size.

    Raises:
        ValueError: the expression has an unknown operation.

    Example: `evaluate(["add", 1, ["mul", 3, "b"]], 4) == 13`.
    """
    if expression == "b":
        return batch
    if isinstance(expression, (list, tuple)):
        operation, *operands = expression
        if operation not in OPERATIONS:
            raise ValueError(f"unknown operation {operation!r} in the size expression {expression!r}")
        return OPERATIONS[operation](*(evaluate(operand, batch) for operand in operands))
    return expression


def capture_key(spec: dict[str, Any]) -> str:
    """Content key of a capture, from the description of the model and its inputs, torch's version and this format."""
    content = {"spec": spec, "torch": importlib.metadata.version("torch"), "format": FORMAT_VERSION}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_cached(key: str, cache_dir: str | Path) -> Captured | None:
    """The capture stored under `key`; None if there is no file or it is damaged."""
    return unseal(Captured, _cached(key, cache_dir))


def store(key: str, captured: Captured, cache_dir: str | Path) -> Path:
    """Write a capture under `key`; other processes see the whole file or none.

    Raises:
        InvalidConfig: the folder cannot be written to.
    """
    path = _cached(key, cache_dir)
    seal(path, captured, "cache_dir")
    return path


def _cached(key: str, cache_dir: str | Path) -> Path:
    return Path(cache_dir).expanduser() / f"{key}.json"
