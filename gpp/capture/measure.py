"""The cost of every node and the storages that it shares, found by running all nodes once on fake tensors.

Nothing is allocated: `FakeTensorMode` tensors have shapes and storages, but no bytes.
"""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gpp.capture.codec import bound_arguments, decode_call, empty_of, is_random, operator_of, writes
from gpp.capture.copies import casting, narrow_copy
from gpp.capture.draft import Draft
from gpp.capture.flops import Counted
from gpp.errors import CaptureError
from gpp.graph.captured import node_references, references

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
        self.cast: set[int] = set()
        """Storages of which copies of another type have been made."""

    def add_parameter(self, name: str, tensor: Tensor) -> None:
        """Make a trained parameter known."""
        self._of[storage_of(tensor)] = frozenset([name])
        self._own.add(storage_of(tensor))

    def add_input(self, tensor: Tensor) -> None:
        """Make a tensor of samples known."""
        self._of[storage_of(tensor)] = _ACTIVATION

    def derived_from(self, tensor: Tensor) -> frozenset[str]:
        """Trained parameters that a tensor was computed from; empty for one of their own memory, and where an input counts too."""
        key = storage_of(tensor)
        return frozenset() if key in self._own else self._of.get(key) or frozenset()

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a trained parameter, or follows from such parameters alone."""
        return bool(self._of.get(storage_of(tensor)))

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if func is torch.ops.aten._to_copy.default:
            self.cast |= read
        sources = [self._of[key] for key in read if key in self._of]
        names = _ACTIVATION if _ACTIVATION in sources else frozenset[str]().union(*(s for s in sources if s is not None))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := storage_of(leaf)) not in self._own:
                if key in read and not func._schema.is_mutable:
                    continue  # a view
                if names == frozenset():
                    self._of.pop(key, None)
                else:
                    self._of[key] = names
        return out


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
        unknown: operators that it calls, forwards and backwards, whose FLOPs are not known (`gpp.capture.flops`).
        casts: storages among those that it reads of which it makes a copy of another type.
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
    unknown: tuple[str, ...] = ()
    casts: tuple[int, ...] = ()


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, valid while somebody holds it."""
    return tensor.untyped_storage()._cdata


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, however it is nested."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def backpropagates(drafts: list[Draft], losses: Iterable[str]) -> set[str]:
    """Names of the nodes through which a gradient of a loss may flow back."""
    needed = set(losses)
    for draft in reversed(drafts):
        writer = draft.kind == "call" and writes(operator_of(draft.target))
        if (draft.name in needed or writer) and not draft.no_grad and ".detach" not in draft.target:
            needed.update(node_references(draft))
            needed.add(draft.name)
    return needed


class MeasuredPass:
    """One pass over the nodes; keeps every value, so that storage identities stay unique.

    Args:
        losses: the nodes that training differentiates.
        passes: as `Captured` has it.
        blocks: hand-written blocks, which run elsewhere: tensors like the results of each, and its facts, in which storages lack.
    """

    def __init__(
        self,
        drafts: list[Draft],
        losses: Iterable[str],
        batch: int,
        passes: str | None = None,
        blocks: Mapping[str, tuple[list[Tensor], Facts]] | None = None,
    ) -> None:
        self.drafts, self.batch, self.losses, self.passes, self.blocks = drafts, batch, tuple(losses), passes, blocks or {}
        self.copied = {name for draft in drafts for name in draft.narrow}
        self.narrow: dict[str, Tensor] = {}
        self.needed = backpropagates(drafts, self.losses)
        self.values: dict[str, Any] = {}
        self.facts: dict[str, Facts] = {}
        self.kept: list[Tensor] = []
        self.counts: dict[Any, _Count] = {}
        self.weights: set[int] = set()
        self.derivations = Derivations()

    def run(self) -> dict[str, Facts]:
        """Facts of every node at the batch size.

        Raises:
            CaptureError: a node does not run at it.
        """
        with FakeTensorMode(allow_non_fake_inputs=True):
            for draft in self.drafts:
                if draft.kind == "call":
                    self._call(draft)
                elif draft.name in self.blocks:
                    self._block(draft)
                else:
                    self._leaf(draft)
            for name, facts in self.facts.items():
                outputs = tensors_in(self.values[name])
                facts.requires_grad = any(tensor.requires_grad for tensor in outputs)
                facts.forms = [((tuple(t.shape), t.stride(), t.dtype), t.requires_grad) for t in outputs]
            # One backward, in which the gradients are seen that the operators with weights get: many share their storages.
            if losses := [loss for name in self.losses if (loss := self.values[name]).requires_grad]:
                torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        return self.facts

    def _leaf(self, draft: Draft) -> None:
        value = empty_of(draft, self.batch).requires_grad_(draft.requires_grad)
        self.values[draft.name] = value
        self.facts[draft.name] = Facts(storages=(storage_of(value),), num_bytes=_bytes([value]))
        if draft.kind in ("param", "buffer"):
            self.weights.add(storage_of(value))
        if draft.kind == "input":
            self.derivations.add_input(value)
        copies = [narrow_copy(value, self.passes)] if self.passes and draft.name in self.copied else list[Tensor]()
        for copy in copies:
            # One for all passes between two updates: it is a weight, too.
            self.narrow[draft.name] = copy
            self.weights.add(storage_of(copy))
        if draft.kind == "param" and draft.requires_grad:
            for own in (value, *copies):
                self.derivations.add_parameter(draft.target, own)

    def _block(self, draft: Draft) -> None:
        results, facts = self.blocks[draft.name]
        grad = [facts.requires_grad and (like.is_floating_point() or like.is_complex()) for like in results]
        made = [torch.empty(x.shape, dtype=x.dtype, device="cpu", requires_grad=g) for x, g in zip(results, grad, strict=True)]
        for tensor in made:
            self.derivations.add_input(tensor)
        read = tensors_in([self.values[name] for name in references(draft.args)])
        # It keeps storages of its own for backward, and, since nobody can look inside, its inputs.
        own = [torch.empty(num_bytes, dtype=torch.uint8, device="cpu") for _, _, num_bytes in facts.saved]
        self.kept += own
        facts.saved = [(storage_of(tensor), _bytes([tensor]), _bytes([tensor])) for tensor in (*own, *read)]
        facts.storages, facts.reads = tuple(map(storage_of, made)), tuple(map(storage_of, read))
        facts.num_bytes = _bytes(made)
        facts.traffic_bytes = facts.num_bytes + _bytes(read)
        self.values[draft.name], self.facts[draft.name] = made[0] if facts.parts is None else tuple(made), facts

    def _call(self, draft: Draft) -> None:
        operator = operator_of(draft.target)
        values = ChainMap({name: self.narrow[name] for name in draft.narrow}, self.values)
        args, kwargs = decode_call(draft, values.__getitem__, self.batch)
        facts = self.facts[draft.name] = Facts()
        before = tensors_in((args, kwargs))
        grad = not draft.no_grad and draft.name in self.needed
        late = [grad and tensor.requires_grad and self.derivations.is_weight(tensor) for tensor in before]
        count = self._count(operator, args, kwargs, draft, late)
        facts.forward_flops, facts.backward_flops, facts.weight_flops, facts.unknown = count
        data = [tensor for tensor, later in zip(before, late, strict=True) if grad and tensor.requires_grad and not later]
        facts.data = [(storage_of(tensor), tensor.untyped_storage().nbytes()) for tensor in data]

        def pack(tensor: Tensor) -> Tensor:
            self.kept.append(tensor)
            storage = tensor.untyped_storage()
            facts.derived |= self.derivations.derived_from(tensor)
            if storage._cdata not in self.weights:
                facts.saved.append((storage._cdata, _bytes([tensor]), storage.nbytes()))
            return tensor

        self.derivations.cast.clear()
        try:
            hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
            with torch.set_grad_enabled(grad), hooks, self.derivations, casting("cpu", self.passes):
                value = operator(*args, **kwargs)
        except Exception as error:
            words = f"{draft.target} at {draft.where} does not run with {self.batch} samples: {error}"
            raise CaptureError(f"{words}. Fix: make it work for any batch size") from error
        self.values[draft.name] = value
        if grad and "lstm." in draft.target:
            # oneDNN's layer keeps a workspace of unknown size, so the plain layer's counts, which is near cuDNN's.
            hidden = _lstm_bytes(before) - sum(num_bytes for _, num_bytes, _ in facts.saved)
            if hidden > 0:
                pack(torch.empty(hidden, dtype=torch.uint8, device="cpu"))
        outputs = tensors_in(value)
        facts.storages = tuple(storage_of(tensor) for tensor in outputs)
        facts.reads = tuple(storage_of(tensor) for tensor in before)
        facts.casts = tuple(storage for storage in facts.reads if storage in self.derivations.cast)
        if any(late):
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._see(draft, gradient))
        facts.parts = None if isinstance(value, Tensor) else len(value)
        facts.num_bytes = _bytes(outputs)
        facts.random = is_random(operator, args, kwargs)
        facts.writes = tuple(storage_of(tensor) for tensor in _written(operator, args, kwargs))
        facts.view = not facts.writes and set(facts.storages) <= set(facts.reads)
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
    ) -> _Count:
        """What a call computes; equal calls are counted once."""
        if ".scaled_dot_product_attention." in draft.target:
            # Without dropout: with it a CPU has no fused kernel, and a card has one, which counts the same.
            args = [*args[:4], *(0.0 for _ in args[4:5]), *args[5:]]
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        leaves, spec = tree_flatten((args, kwargs))
        grad = not draft.no_grad and draft.name in self.needed
        describe = [(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x) for x in leaves]
        key = (draft.target, str(describe), str(spec), grad, tuple(late))
        if key not in self.counts:
            self.counts[key] = _counted(operator, leaves, spec, draft.target, grad, late, casting("cpu", self.passes))
        return self.counts[key]


class _Count(NamedTuple):
    """FLOPs of a call, and the operators among what it calls whose FLOPs are not known.

    Args:
        weights: of the backward's, those of the gradients of weights.
    """

    forward: float
    backward: float = 0.0
    weights: float = 0.0
    unknown: tuple[str, ...] = ()


def _counted(
    operator: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    target: str,
    grad: bool,
    late: list[bool],
    context: AbstractContextManager[object],
) -> _Count:
    if any(part in target for part in _RECURRENT):
        # It runs as one fused kernel; every weight matrix multiplies every time step's vector.
        tensors = tensors_in(leaves)
        forward = 2.0 * tensors[0].shape[0] * tensors[0].shape[1] * sum(t.numel() for t in tensors if t.dim() == 2)
        return _Count(forward, 2.0 * forward)
    fresh = [torch.empty_like(leaf).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # a leaf that requires grad must not be written in place; its copy may be
    used = [leaf.clone() if isinstance(leaf, Tensor) and writes(operator) else leaf for leaf in fresh]
    args, kwargs = tree_unflatten(used, spec)
    backward, second = Counted(), Counted()
    with torch.set_grad_enabled(grad):
        with context, Counted() as forwards:
            outputs = operator(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        tensors = [leaf for leaf in fresh if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tensors if leaf.requires_grad]
        # What computes nothing forwards does so backwards, too, and most operators are such.
        if outputs and inputs and (forwards.flops or forwards.unknown):
            weights = [leaf for leaf, later in zip(tensors, late, strict=True) if later]
            seeds = list(map(torch.empty_like, outputs))
            with backward, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an operator without a gradient: whether one is needed is seen later
                torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=bool(weights))
            with second:
                if weights:
                    torch.autograd.grad(outputs, weights, seeds, allow_unused=True)
    return _Count(forwards.flops, backward.flops, second.flops, tuple({**forwards.unknown, **backward.unknown}))


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
                out += tensors_in(given[argument.name])
    if "running_mean" in given and (given.get("training") or given.get("use_input_stats")):
        out += tensors_in((given["running_mean"], given["running_var"]))
    return out
