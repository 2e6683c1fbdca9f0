"""A flat list of node drafts from an exported program.

Symbolic sizes become expressions, `torch.no_grad` regions are inlined, tied weights get one name, and user paths lose
the wrapper's prefix.
"""

from __future__ import annotations

import base64
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from gpp.capture.codec import GETITEM, UnknownSize, encode, expression_of, operator_of, size, stored_name
from gpp.capture.homes import home_of
from gpp.capture.trace import Traced
from gpp.capture.user_lines import REWRITE, where_of
from gpp.errors import CaptureError
from gpp.graph.captured import Items
from gpp.graph.order import fresh_name
from gpp.models.losses import named_tensors

# checks that torch adds while tracing; they compute nothing
_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size"}
_KINDS = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_MAX_CONSTANT_BYTES = 1 << 20


@dataclass(kw_only=True)
class Draft:
    """A node while it is being made: the fields of `gpp.graph.captured.Node`, and two more.

    Args:
        where: the user's line.
        in_loss: whether it is a step of the loss or of a metric, not of the network.
    """

    name: str
    kind: str
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
    home: str = ""
    narrow: tuple[str, ...] = ()
    where: str = ""
    in_loss: bool = False


@dataclass(kw_only=True)
class Drafts:
    """All drafts in execution order, the results' nodes, constants, tied names and items (see `Captured`)."""

    drafts: list[Draft]
    results: dict[str, str]
    constants: dict[str, str | None]
    aliases: dict[str, str]
    items: tuple[Items, ...] = ()


def tied_names(model: nn.Module, loss: nn.Module | None = None) -> dict[str, str]:
    """Other names of tied parameters and buffers, each with the first name, in the model's order, the loss's last.

    Ties are found by identity of the tensor object, which also holds on the meta device, and for real
    tensors also by identical storage, shape and offset.
    """
    canonical: dict[Any, str] = {}
    aliases = {}
    for name, tensor in named_tensors(model, loss, tied=True):
        key: Any = id(tensor)
        if not tensor.is_meta and tensor.numel() and tensor.untyped_storage().data_ptr():
            key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if canonical.setdefault(key, name) != name:
            aliases[name] = canonical[key]
    return aliases


def batch_dimension(shape: tuple[Any, ...] | None, fixed: int | None) -> int | None:
    """Position of the batch dimension; None where samples cannot be told apart.

    Sizes are plain numbers at a fixed batch size: the first dimension of that size is taken.
    """
    if shape is None:
        return None
    if fixed is not None:
        return next((i for i, extent in enumerate(shape) if extent == fixed), None)
    symbolic = [i for i, extent in enumerate(shape) if not isinstance(extent, int)]
    return symbolic[0] if len(symbolic) == 1 and shape[symbolic[0]] == "b" else None


class Reader:
    """Reads an exported program.

    Args:
        loss: the module of the loss, where it is one.
        imports: see `gpp.capture.homes.home_of`.
    """

    def __init__(self, traced: Traced, model: nn.Module, loss: nn.Module | None = None, imports: tuple[str, ...] = ()) -> None:
        self.traced, self.aliases, self.imports = traced, tied_names(model, loss), imports
        self.drafts: list[Draft] = []
        self.constants: dict[str, str | None] = {}
        self.taken: set[str] = set()

    def read(self) -> Drafts:
        """Drafts of every node, dead ones included.

        Raises:
            CaptureError: the program has autocast or another higher-order operator, or a size that depends on the data.
        """
        program = self.traced.program
        values: dict[torch.fx.Node, Any] = {}
        users = iter(self.traced.inputs)
        leaves: dict[tuple[str, str], str] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind not in _KINDS:
                user = next(iter(node.users), node)
                what = f"{getattr(user.target, '__name__', user.target)} at {_where(user)} takes an object that is no tensor"
                fix = "a torch.Generator cannot be stored: leave generator= out; keep numbers that are drawn once in a buffer"
                raise CaptureError(f"{what} ({spec.kind.name.lower()} {spec.target}), and cannot be captured. Fix: {fix}")
            kind = _KINDS[spec.kind]
            target = next(users) if kind == "input" else (spec.target or "").removeprefix("model.")
            target = self.aliases.get(target, target)
            if (kind, target) not in leaves:
                leaves[kind, target] = self._leaf(kind, target, node, spec)
            values[node] = {"ref": leaves[kind, target]}
        outputs = self._emit(program.graph_module, values, no_grad=False)
        results = {name: self._result(name, output) for name, output in zip(self.traced.results, outputs, strict=True)}
        return Drafts(drafts=self.drafts, results=results, constants=self.constants, aliases=self.aliases)

    def _leaf(self, kind: str, target: str, node: torch.fx.Node, spec: Any) -> str:
        value = node.meta["val"]
        if value.dtype in (torch.complex128, torch.complex32) and kind != "input":
            rule = f"{target} is of type {str(value.dtype).removeprefix('torch.')}, which files of weights have not"
            raise CaptureError(f"{rule}. Fix: keep it in complex64, or as real numbers (torch.view_as_real)")
        draft = self._add(target, kind=kind, target=target, value=value, where="")
        draft.persistent = spec.persistent is not False
        if kind == "param":
            draft.requires_grad = self.traced.program.state_dict[spec.target].requires_grad
        if kind == "constant":
            self.constants[draft.name] = _stored(self.traced.program.constants.get(spec.target))
        return draft.name

    def _add(self, wish: str, *, value: Any, **fields: Any) -> Draft:
        """A new draft with shape and dtype of `value`."""
        draft = Draft(name=fresh_name(wish, self.taken), **fields)
        if isinstance(value, Tensor):
            try:
                draft.shape = tuple(expression_of(extent) for extent in value.shape)
            except UnknownSize as error:
                raise CaptureError(
                    f"{draft.target} at {draft.where} makes a tensor whose size is {error}. Fix: mask instead of "
                    "selecting (torch.where), or use hand-written blocks (model=blocks)"
                ) from error
            draft.dtype = str(value.dtype).removeprefix("torch.")
            draft.batch_dim = batch_dimension(draft.shape, self.traced.batch)
        self.drafts.append(draft)
        return draft

    def _emit(self, owner: torch.fx.GraphModule, values: dict[torch.fx.Node, Any], *, no_grad: bool) -> list[Any]:
        """Append drafts for the graph of `owner`; returns its encoded outputs."""
        for node in owner.graph.nodes:
            if node.op == "output":
                return [encode(item, self._lookup(values, node)) for item in node.args[0]]
            if node.op == "call_function":
                self._call(owner, node, values, no_grad)
        raise CaptureError("the exported graph has no output")

    def _lookup(self, values: dict[torch.fx.Node, Any], user: torch.fx.Node) -> Callable[[torch.fx.Node], Any]:
        def lookup(node: torch.fx.Node) -> Any:
            found = values[node]
            if isinstance(found, UnknownSize):
                raise CaptureError(
                    f"{user.target} at {_where(user)} uses {found}. Fix: keep it a tensor "
                    "(no .item(), no int()), or describe the model by hand-written blocks (model=blocks)"
                )
            return found

        return lookup

    def _call(self, owner: torch.fx.GraphModule, node: torch.fx.Node, values: dict[torch.fx.Node, Any], no_grad: bool) -> None:
        target, value, where = node.target, node.meta.get("val"), _where(node)
        lookup = self._lookup(values, node)
        if isinstance(target, torch._ops.HigherOrderOperator):
            values[node] = self._region(owner, node, values, no_grad)
            return
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            try:
                values[node] = size(expression_of(value))
            except UnknownSize as error:
                values[node] = error
            return
        if isinstance(target, torch._ops.OpOverload) and target._schema.name.split("::")[1] in _CHECKS:
            return
        if target is torch.ops.aten.broadcast_tensors.default:
            values[node] = [self._broadcast(node, i, values, where, no_grad) for i in range(len(node.meta["val"]))]
            return
        source = node.args[0] if target is operator.getitem else None
        if isinstance(source, torch.fx.Node) and isinstance(values.get(source), list):
            values[node] = values[source][node.args[1]]
            return
        if target is not operator.getitem and not isinstance(target, torch._ops.OpOverload):
            name = getattr(target, "__name__", target)
            raise CaptureError(f"{name} at {where} is not a tensor operator that can be stored. Fix: {REWRITE}")
        name = stored_name(target) if isinstance(target, torch._ops.OpOverload) else GETITEM
        stored = operator_of(name)
        kwargs = {key: encode(item, lookup) for key, item in node.kwargs.items()}
        draft = self._add(
            node.name,
            value=value,
            kind="call",
            target=name,
            where=where,
            args=encode(_dense(target, node.args), lookup),
            kwargs=kwargs,
            module=_module_path(node),
            in_loss=_in_loss(node),
            no_grad=no_grad,
            home=home_of(stored, where, self.imports) if isinstance(stored, torch._ops.OpOverload) else "",
        )
        values[node] = {"ref": draft.name}

    def _broadcast(self, node: torch.fx.Node, item: int, values: dict[torch.fx.Node, Any], where: str, no_grad: bool) -> Any:
        """One tensor of a broadcast on its own, so that the others do not depend on it (a prediction on its target)."""
        sources = node.args[0]
        assert isinstance(sources, (list, tuple))
        source = sources[item]
        assert isinstance(source, torch.fx.Node)
        value = node.meta["val"][item]
        encoded = self._lookup(values, node)(source)
        if source.meta["val"].shape == value.shape:
            return encoded
        shape = [size(expression_of(extent)) for extent in value.shape]
        draft = self._add(
            f"{node.name}_{item}",
            value=value,
            kind="call",
            target="aten.expand.default",
            where=where,
            args=[encoded, shape],
            module=_module_path(node),
            in_loss=_in_loss(node),
            no_grad=no_grad,
        )
        return {"ref": draft.name}

    def _region(
        self, owner: torch.fx.GraphModule, node: torch.fx.Node, values: dict[torch.fx.Node, Any], no_grad: bool
    ) -> list[Any]:
        """Inline a `torch.no_grad` (or enable_grad) region."""
        assert isinstance(node.target, torch._ops.HigherOrderOperator)
        kind = node.target.name()
        place = self._place(owner, node)
        if "autocast" in kind:
            why = "a cut could fall inside its region"
            raise CaptureError(f"torch.autocast at {place} cannot be captured: {why}. Fix: remove it and set dtype=bfloat16")
        if "set_grad_enabled" not in kind:
            raise CaptureError(f"the higher-order operator {kind} at {place} cannot be captured. Fix: {REWRITE}")
        enabled, inner, *operands = node.args
        assert isinstance(inner, torch.fx.Node)  # the owner passes it the region
        region = getattr(owner, str(inner.target))
        lookup = self._lookup(values, node)
        placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
        local = {p: encode(operand, lookup) for p, operand in zip(placeholders, operands, strict=True)}
        return self._emit(region, local, no_grad=not enabled)

    def _place(self, owner: torch.fx.GraphModule, node: torch.fx.Node) -> str:
        """The user's line of a region, from its first inner node: the call itself has no stack trace."""
        for argument in node.args:
            if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
                inner = getattr(owner, str(argument.target))
                for step in inner.graph.nodes:
                    if step.meta.get("stack_trace"):
                        return _where(step)
        return _where(node)

    def _result(self, name: str, output: Any) -> str:
        """Node of an output; one that is not a scalar tensor made by a call is refused or copied."""
        found = {draft.name: draft for draft in self.drafts}.get(output.get("ref", "")) if isinstance(output, dict) else None
        if found is None:
            raise CaptureError(f"{name} does not depend on the model's tensors (it is {output!r}). Fix: return a scalar tensor")
        if found.shape != ():
            raise CaptureError(f"{name} has shape {found.shape}. Fix: return a scalar, the mean over the samples")
        return found.name


def _dense(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a call with which its gradients are dense, since sums over micro-batches and devices are.

    torch's optimizers that take sparse gradients make the same steps of dense ones, but for SparseAdam, which is refused.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return args
    names = [argument.name for argument in target._schema.arguments]
    return tuple(False if name == "sparse" else value for name, value in zip(names, args, strict=False))


def _scope(node: torch.fx.Node) -> str:
    """Path of the innermost module inside the wrapper: `model`, `model.a.b`, or another for loss and metrics."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if not path.startswith("_")]
    return re.sub(r"@\d+", "", stack[-1]) if stack else ""


def _in_loss(node: torch.fx.Node) -> bool:
    return _scope(node).split(".")[0] != "model"


def _module_path(node: torch.fx.Node) -> str:
    """Path of the innermost user module; the wrapper's own scope is the loss."""
    path = _scope(node)
    if path == "model":
        return ""
    return path.removeprefix("model.") if path.startswith("model.") else "loss"


def _where(node: torch.fx.Node) -> str:
    """The user's line, or at least the module (torch keeps only the lines of `forward` methods)."""
    return where_of(node.meta.get("stack_trace")) or f"module {_module_path(node) or 'of the model'}"


def _stored(tensor: object) -> str | None:
    """Base64 of a constant's bytes; None where it is too large or has no value."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_sparse:
        return None
    if tensor.numel() * tensor.element_size() > _MAX_CONSTANT_BYTES:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(flat.numpy().tobytes()).decode()
