"""The memory that an operator takes while it runs, beyond what it keeps for its backward.

Every operator runs alone on fake tensors, forward and backward, and each storage is followed from its making to its end
(a weak reference tells; an address would come back). So temporaries inside an operator, gradients under way and the
order in which autograd lets go of saved tensors are counted as they happen, without a rule for each kind of operator.
What a kernel allocates for itself and no tensor shows is not seen.
"""

from __future__ import annotations

import json
import weakref
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from gpp.capture.codec import called, empty_of
from gpp.capture.copies import casting, narrow_copy
from gpp.capture.draft import Draft
from gpp.capture.measure import Facts, tensors_in
from gpp.graph.captured import node_references, renamed


class Transient(NamedTuple):
    """Bytes beyond what an operator keeps, at the fullest moment of its forward and its backward; a line as in
    `gpp.graph.transients`.

    Args:
        per_sample: for each sample.
        fixed: at any number of them: a weight's gradient before it is added to the sum.
    """

    per_sample: float
    fixed: float


class MeasuredTransients:
    """Transients of the operators of one model; equal operators are run once.

    Args:
        drafts: by name.
        facts: of all drafts, at batch size `batch`.
        passes: as `Captured` has it.
    """

    def __init__(self, drafts: Mapping[str, Draft], facts: Mapping[str, Facts], batch: int, passes: str | None) -> None:
        self._drafts, self._facts, self._batch, self._passes = drafts, facts, batch, passes
        self._known: dict[str, Transient] = {}

    def of(self, closure: Sequence[str], outputs: Iterable[str], kept_bytes: int) -> Transient:
        """Of one operator; hand-written blocks are not looked into.

        Args:
            closure: its nodes, with the free nodes and the leaves that they need, in execution order.
            outputs: nodes whose values others read, losses included.
            kept_bytes: of the storages that it makes and that somebody keeps for a backward.
        """
        if any(self._drafts[name].kind == "block" for name in closure):
            return Transient(0.0, 0.0)
        outputs = [name for name in closure if name in set(outputs)]
        key = self._key(closure, outputs, kept_bytes)
        if key not in self._known:
            self._known[key] = self._run(closure, outputs, kept_bytes)
        return self._known[key]

    def _key(self, closure: Sequence[str], outputs: list[str], kept_bytes: int) -> str:
        """The key of a run: all that it depends on, with names replaced by positions."""
        place: dict[str, int] = {}
        rows: list[Any] = [kept_bytes]
        for name in closure:
            draft = self._drafts[name]
            for need in node_references(draft):
                if need not in place:
                    rows.append(self._form(need))
                    place[need] = len(place)
            target = draft.target if draft.kind == "call" else ""
            narrow = [place[need] for need in draft.narrow]
            row = [draft.kind, target, draft.no_grad, draft.args, draft.kwargs, name in outputs, narrow]
            rows.append([place.setdefault(name, len(place)), self._form(name), renamed(row, place)])
        return json.dumps(rows)

    def _form(self, name: str) -> list[Any]:
        draft, facts = self._drafts[name], self._facts[name]
        return [draft.shape, draft.dtype, facts.requires_grad, [str(form) for form in facts.forms]]

    def _run(self, closure: Sequence[str], outputs: list[str], kept_bytes: int) -> Transient:
        own = set(closure)
        last_use = {need: i for i, name in enumerate(closure) for need in node_references(self._drafts[name])}
        with FakeTensorMode(allow_non_fake_inputs=True):
            values, narrow, ledger = dict[str, Any](), dict[str, Tensor](), _Ledger()
            copied = {need for name in closure for need in self._drafts[name].narrow}
            for name in closure:
                for need in node_references(self._drafts[name]):
                    if need not in own and need not in values:
                        values[need] = self._given(need)
                if self._drafts[name].kind != "call":
                    values[name] = self._leaf(name, ledger)
                    if name in copied:
                        narrow[name] = narrow_copy(values[name], self._passes or "")
                        if values[name].requires_grad:
                            narrow[name].register_hook(ledger.of_weight)
            with ledger:
                with casting("cpu", self._passes):
                    edges, seeds = self._forward(closure, outputs, values, narrow, last_use)
                values.clear()
                if edges:
                    torch.autograd.backward(edges, seeds)
        moments = ledger.moments()
        growing = max(growing for growing, _ in moments)
        first = max(growing / self._batch + fixed for growing, fixed in moments)
        per_sample = growing / self._batch
        return Transient(max(per_sample - kept_bytes / self._batch, 0.0), first - per_sample)

    def _forward(
        self,
        closure: Sequence[str],
        outputs: list[str],
        values: dict[str, Any],
        narrow: Mapping[str, Tensor],
        last_use: dict[str, int],
    ) -> tuple[list[Any], list[Tensor]]:
        """Run the nodes; returns the tensors at which gradients come in, and gradients of their shapes.

        Args:
            narrow: the copies of parameters in the type of the passes.
        """
        for i, name in enumerate(closure):
            draft = self._drafts[name]
            if draft.kind != "call":
                continue
            read = ChainMap({need: narrow[need] for need in draft.narrow}, values)
            with torch.set_grad_enabled(not draft.no_grad):
                values[name] = called(draft, read.__getitem__, self._batch)
            for need in node_references(draft):
                if last_use[need] == i and need not in outputs:
                    del values[need]
                    last_use[need] = -1
        made = [t for name in outputs for t in tensors_in(values[name]) if t.requires_grad and t.grad_fn is not None]
        return [get_gradient_edge(t) for t in made], [torch.empty_like(t) for t in made]

    def _given(self, name: str) -> Any:
        """The value of another operator's node, whose gradient is let go of."""
        parts = []
        for (shape, stride, dtype), differentiable in self._facts[name].forms:
            value = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            if differentiable:
                value = _Catch.apply(value.requires_grad_())
            parts.append(value)
        return parts[0] if self._facts[name].parts is None else tuple(parts)

    def _leaf(self, name: str, ledger: _Ledger) -> Tensor:
        draft = self._drafts[name]
        value = empty_of(draft, self._batch)
        if draft.kind == "param" and draft.requires_grad:
            value.requires_grad_()
            # As from the second micro-batch on: the sum is there, and gradients are added to it.
            value.grad = torch.empty_like(value)
            value.register_hook(ledger.of_weight)
        return value


class _Catch(torch.autograd.Function):
    """Hands a value on, and keeps its gradient alive as the operator that made the value would."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # type: ignore[override]
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        ctx.gradient = gradient


class _Ledger(TorchDispatchMode):
    """Follows the storages that are made inside, in order: (number, bytes) where one is made, (number, 0) where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}  # storage -> its number
        self._weights: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._live:
                if func is torch.ops.aten._to_copy.default and any(self._live.get(key) in self._weights for key in given):
                    self._weights.add(len(self._events))
                self._live[storage._cdata] = len(self._events)
                self._events.append((len(self._events), storage.nbytes()))
                weakref.finalize(storage, self._end, storage._cdata)
        return out

    def of_weight(self, gradient: Tensor) -> None:
        """Note a gradient that does not grow with the batch."""
        self._weights.add(self._live.get(gradient.untyped_storage()._cdata, -1))

    def _end(self, storage: int) -> None:
        self._events.append((self._live.pop(storage), 0))

    def moments(self) -> list[tuple[int, int]]:
        """The bytes after each event: of storages that grow with the batch, and of the others."""
        live: dict[int, int] = {}
        growing = fixed = 0
        out = [(0, 0)]
        for number, size in self._events:
            change = -live.pop(number) if number in live else size
            if change >= 0:
                live[number] = size
            if number in self._weights:
                fixed += change
            else:
                growing += change
            out.append((growing, fixed))
        return out
