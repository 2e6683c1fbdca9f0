"""The cost of every node and the storages that it shares, found by running all nodes once on fake tensors.

Nothing is allocated: `FakeTensorMode` tensors have shapes and storages, but no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from gpp.capture.codec import bound_arguments, decode_call, dtype_of, is_random, operator_of, writes
from gpp.capture.draft import Draft
from gpp.errors import CaptureError
from gpp.graph.captured import evaluate, references

_ACTIVATION = None
"""In place of names: the tensor depends on an input."""


@final
class Derivations(TorchDispatchMode):
    """Follows what tensors are computed from, below autograd: the parts of a composite operator count one by one.

    A tensor without an entry is a constant, a buffer or a frozen parameter, or random.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, frozenset[str] | None] = {}
        self._own: set[int] = set()

    def add_parameter(self, name: str, tensor: Tensor) -> None:
        """Make a trained parameter known."""
        self._of[_storage(tensor)] = frozenset([name])
        self._own.add(_storage(tensor))

    def add_input(self, tensor: Tensor) -> None:
        """Make a tensor of samples known."""
        self._of[_storage(tensor)] = _ACTIVATION

    def derived_from(self, tensor: Tensor) -> frozenset[str]:
        """Trained parameters that a tensor was computed from; empty for one of their own memory, and where an input counts too."""
        key = _storage(tensor)
        return frozenset() if key in self._own else self._of.get(key) or frozenset()

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a trained parameter, or follows from such parameters alone."""
        return bool(self._of.get(_storage(tensor)))

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        sources = [self._of[key] for key in read if key in self._of]
        names = _ACTIVATION if _ACTIVATION in sources else frozenset[str]().union(*(s for s in sources if s is not None))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := _storage(leaf)) not in self._own:
                if key in read and not func._schema.is_mutable:
                    continue  # a view
                if names == frozenset():
                    self._of.pop(key, None)
                else:
                    self._of[key] = names
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


_RECURRENT = ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


@dataclass(kw_only=True)
class Facts:
    """Measurements of one node for the whole batch. Bytes and FLOPs are absolute, not per sample.

    Args:
        storages: storages of its outputs; leaves included.
        reads: storages of its tensor arguments.
        writes: storages that it writes in place (running statistics included).
        view: whether it makes no new data.
        parts: number of outputs when they come as a tuple, else None.
        forms: shape, strides and dtype of each output, and whether a gradient flows back through it.
        saved: for each tensor that it keeps for backward: storage, bytes of the view, bytes of the storage.
        derived: trained parameters from which alone it keeps a tensor that is computed.
        weight_flops: of the backward's, those of the gradients of trained weights and of what follows from them alone.
        data: storage and bytes of each other tensor among its arguments through which a gradient flows.
        gradients: storage and bytes of the gradients of its outputs, where it reads trained weights.
        uncounted: whether its FLOPs are not known, and count as none.
    """

    storages: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    view: bool = False
    random: bool = False
    parts: int | None = None
    num_bytes: int = 0
    requires_grad: bool = False
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    traffic_bytes: int = 0
    saved: list[tuple[int, int, int]] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    forms: list[tuple[Form, bool]] = field(default_factory=list)
    weight_flops: float = 0.0
    data: list[tuple[int, int]] = field(default_factory=list)
    gradients: list[tuple[int, int]] = field(default_factory=list)
    uncounted: bool = False


def _products_flops(a: Sequence[int], b: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of rows with the matrix of their group, each: `gpp.capture.grouped`.

    Args:
        a: [S, k] with `b` [groups, k, n] in a forward and, transposed, for the gradient of the rows; torch's operator takes [k, S]
            with [S, n] for that of the matrices, and [groups, m, k] with [k, S] or [groups, k, n].
    """
    of_columns = len(a) == 3 and len(b) == 2
    return 2 * math.prod(a[of_columns:]) * b[-1]


def _gradient_flops(rows: Sequence[int], gradients: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(rows) * gradients[-1]


register_flop_formula(torch.ops.gpp.grouped_mm_forward)(_products_flops)
register_flop_formula(torch.ops.gpp.grouped_mm_gradient)(_gradient_flops)
if torch.ops.aten._grouped_mm not in flop_registry:  # torch 2.13 has no formula for its own, which would count as nothing
    register_flop_formula(torch.ops.aten._grouped_mm)(_products_flops)


def form_of(tensor: Tensor, differentiable: bool) -> tuple[Form, bool]:
    """The entry of `Facts.forms` for a tensor."""
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype), differentiable


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, valid while somebody holds it."""
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def backpropagates(drafts: list[Draft], losses: Iterable[str]) -> set[str]:
    """Names of the nodes through which a gradient of a loss may flow back."""
    needed = set(losses)
    for draft in reversed(drafts):
        writer = draft.kind == "call" and writes(operator_of(draft.target))
        if (draft.name in needed or writer) and not draft.no_grad and ".detach" not in draft.target:
            needed.update(references([*draft.args, *draft.kwargs.values()]))
            needed.add(draft.name)
    return needed


def measure(drafts: list[Draft], losses: Iterable[str], batch: int) -> dict[str, Facts]:
    """Facts of every node at a batch size; `losses` are the nodes that training differentiates.

    Raises:
        CaptureError: a node does not run at this batch size.
    """
    return _MeasuredPass(drafts, losses, batch).run()


class _MeasuredPass:
    """One pass over the nodes; keeps every value, so that storage identities stay unique."""

    def __init__(self, drafts: list[Draft], losses: Iterable[str], batch: int) -> None:
        self.drafts, self.batch, self.losses = drafts, batch, tuple(losses)
        self.needed = backpropagates(drafts, self.losses)
        self.values: dict[str, Any] = {}
        self.facts: dict[str, Facts] = {}
        self.kept: list[Tensor] = []
        self.flops: dict[Any, tuple[float, float, float]] = {}
        self.weights: set[int] = set()
        self.derivations = Derivations()

    def run(self) -> dict[str, Facts]:
        """See `measure`."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            for draft in self.drafts:
                if draft.kind == "call":
                    self._call(draft)
                else:
                    self._leaf(draft)
            for name, facts in self.facts.items():
                outputs = _tensors(self.values[name])
                facts.requires_grad = any(tensor.requires_grad for tensor in outputs)
                facts.forms = [form_of(tensor, tensor.requires_grad) for tensor in outputs]
            self._go_back()
        return self.facts

    def _go_back(self) -> None:
        """One backward, in which the gradients are seen that the operators with weights get: many share their storages."""
        losses = [self.values[name] for name in self.losses if self.values[name].requires_grad]
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])

    def _leaf(self, draft: Draft) -> None:
        shape = [evaluate(extent, self.batch) for extent in draft.shape or ()]
        value = torch.empty(shape, dtype=dtype_of(draft.dtype or "float32"), device="cpu", requires_grad=draft.requires_grad)
        self.values[draft.name] = value
        self.facts[draft.name] = Facts(storages=(storage_of(value),), num_bytes=_bytes([value]))
        if draft.kind in ("param", "buffer"):
            self.weights.add(storage_of(value))
        if draft.kind == "input":
            self.derivations.add_input(value)
        if draft.kind == "param" and draft.requires_grad:
            self.derivations.add_parameter(draft.target, value)

    def _call(self, draft: Draft) -> None:
        operator = operator_of(draft.target)
        args, kwargs = decode_call(draft.args, draft.kwargs, self.values.__getitem__, self.batch)
        facts = self.facts[draft.name] = Facts()
        before = _tensors((args, kwargs))
        grad = not draft.no_grad and draft.name in self.needed
        late = [grad and tensor.requires_grad and self.derivations.is_weight(tensor) for tensor in before]
        facts.forward_flops, facts.backward_flops, facts.weight_flops = self._count(operator, args, kwargs, draft, late)
        data = [tensor for tensor, later in zip(before, late, strict=True) if grad and tensor.requires_grad and not later]
        facts.data = [(storage_of(tensor), tensor.untyped_storage().nbytes()) for tensor in data]

        def pack(tensor: Tensor) -> Tensor:
            self.kept.append(tensor)
            storage = tensor.untyped_storage()
            facts.derived |= self.derivations.derived_from(tensor)
            if storage._cdata not in self.weights:
                facts.saved.append((storage._cdata, _bytes([tensor]), storage.nbytes()))
            return tensor

        try:
            with torch.set_grad_enabled(grad), saved_tensors_hooks(pack, lambda tensor: tensor), self.derivations:
                value = operator(*args, **kwargs)
        except Exception as error:
            raise CaptureError(
                f"{draft.target} at {draft.where} does not run with {self.batch} samples: {error}. "
                "Fix: make it work for any batch size"
            ) from error
        self.values[draft.name] = value
        if grad and "lstm." in draft.target:
            # oneDNN's layer keeps a workspace of unknown size, so the plain layer's counts, which is near cuDNN's.
            hidden = _lstm_bytes(before) - sum(num_bytes for _, num_bytes, _ in facts.saved)
            if hidden > 0:
                pack(torch.empty(hidden, dtype=torch.uint8, device="cpu"))
        outputs = _tensors(value)
        facts.storages = tuple(storage_of(tensor) for tensor in outputs)
        facts.reads = tuple(storage_of(tensor) for tensor in before)
        if any(late):
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._see(draft, gradient))
        facts.parts = None if isinstance(value, Tensor) else len(value)
        facts.num_bytes = _bytes(outputs)
        facts.random = is_random(operator, args, kwargs)
        facts.writes = tuple(storage_of(tensor) for tensor in _written(operator, args, kwargs))
        facts.view = not facts.writes and set(facts.storages) <= set(facts.reads)
        facts.uncounted = not facts.forward_flops and not facts.view and _is_uncounted(operator, args, outputs)
        if not facts.view:
            facts.traffic_bytes = _bytes(t for t in before if storage_of(t) not in self.weights) + facts.num_bytes

    def _see(self, draft: Draft, gradient: Tensor | None) -> None:
        if gradient is None:
            raise CaptureError(
                f"no gradient comes back to {draft.target} at {draft.where}: an operator behind it has no formula of its gradient. "
                "Fix: give it one (torch.library.register_autograd)"
            )
        self.kept.append(gradient)
        self.facts[draft.name].gradients.append((storage_of(gradient), gradient.untyped_storage().nbytes()))

    def _count(
        self, operator: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], draft: Draft, late: list[bool]
    ) -> tuple[float, float, float]:
        """Forward and backward FLOPs of a call, and those of the latter for its weights; equal calls are counted once."""
        leaves, spec = tree_flatten((args, kwargs))
        grad = not draft.no_grad and draft.name in self.needed
        describe = [(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x) for x in leaves]
        key = (draft.target, str(describe), str(spec), grad, tuple(late))
        if key not in self.flops:
            self.flops[key] = _count_flops(operator, leaves, spec, draft.target, grad, late)
        return self.flops[key]


def _count_flops(
    operator: Callable[..., Any], leaves: list[Any], spec: Any, target: str, grad: bool, late: list[bool]
) -> tuple[float, float, float]:
    if any(part in target for part in _RECURRENT):
        return *_recurrent_flops(leaves), 0.0
    fresh = [torch.empty_like(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # a leaf that requires grad must not be written in place; its copy may be
    used = [leaf.clone() if isinstance(leaf, Tensor) and writes(operator) else leaf for leaf in fresh]
    args, kwargs = tree_unflatten(used, spec)
    # the fused CPU attention has no FLOP formula; the plain one is counted as its matrix products
    with sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(grad):
        with FlopCounterMode(display=False) as forward:
            outputs = operator(*args, **kwargs)
        if not forward.get_total_flops():
            return 0.0, 0.0, 0.0
        outputs = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        tensors = [leaf for leaf in fresh if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tensors if leaf.requires_grad]
        if not outputs or not inputs:
            return float(forward.get_total_flops()), 0.0, 0.0
        weights, seeds = [leaf for leaf, later in zip(tensors, late, strict=True) if later], list(map(torch.empty_like, outputs))
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=bool(weights))
        with FlopCounterMode(display=False) as second:
            if weights:
                torch.autograd.grad(outputs, weights, seeds, allow_unused=True)
    return tuple(float(mode.get_total_flops()) for mode in (forward, backward, second))  # type: ignore[return-value]


def _is_uncounted(operator: Callable[..., Any], args: list[Any], outputs: list[Tensor]) -> bool:
    """Whether a call that counts no FLOPs is work of an unknown amount: another library's operator, or a product of torch's.

    A product sums over an extent of two matrices that its result does not have, and uses each element several times. Losses, and
    products row by row, have few operations.
    """
    if not isinstance(operator, torch._ops.OpOverload) or len(outputs) != 1:
        return False
    operands = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    if operator.namespace not in ("aten", "prims"):
        return bool(operands)
    extents = [set(operand.shape) - {1} for operand in operands if operand.dim() > 1]
    summed = set.intersection(*extents[:2]) - set(outputs[0].shape) if len(extents) > 1 else set()
    largest = max((operand.numel() for operand in operands), default=0)
    return bool(summed) and math.prod(summed) * outputs[0].numel() > largest and "loss" not in operator.name()


def _recurrent_flops(leaves: list[Any]) -> tuple[float, float]:
    """A recurrent layer runs as one fused kernel; every weight matrix multiplies every time step's vector."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    steps = tensors[0].shape[0] * tensors[0].shape[1]
    forward = 2.0 * steps * sum(t.numel() for t in tensors if t.dim() == 2)
    return forward, 2.0 * forward


def _lstm_bytes(tensors: list[Tensor]) -> int:
    """Bytes kept at each step: four gates, two forms of the cell, the state; each has a quarter of a matrix's rows."""
    x, recurrent = tensors[0], [t for t in tensors if t.dim() == 2][1::2]
    return x.shape[0] * x.shape[1] * x.element_size() * sum(7 * t.shape[0] // 4 for t in recurrent)


def _written(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that a call writes in place.

    Batch and instance normalisation update their running statistics although their schemas do not say so.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return []
    given = bound_arguments(operator, args, kwargs)
    out = []
    if writes(operator):
        for argument in operator._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                out += _tensors(given[argument.name])
    if "running_mean" in given and (given.get("training") or given.get("use_input_stats")):
        out += _tensors((given["running_mean"], given["running_var"]))
    return out
