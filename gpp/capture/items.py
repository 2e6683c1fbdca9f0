"""The numbers by which a loss is divided: the labels that count, the weights of their classes, the ones of a mask.

A mean over the tokens of a mini-batch is the sum over its tokens, divided by how many there are. Cut into micro-batches it stays
that mean only if each part is divided by its share of the number for the whole mini-batch. That number follows from inputs and
targets alone, so whoever has them knows it before the first forward: no device waits for another, and nothing more is kept.

    sum of a micro-batch's terms / (number of the mini-batch * samples here / samples of the mini-batch)

Weighted by the micro-batch's share of the samples, as all losses are, these add up to the mean of the whole mini-batch; a part
without a label adds zero. `ItemFinder` finds such numbers among a program's nodes and puts a given one in the place of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpp.capture.codec import bound_arguments, called, dtype_of, is_random, operator_of, sizes_of, writes
from gpp.capture.counts import near, needed_by, needs
from gpp.capture.draft import Draft, Drafts
from gpp.errors import CaptureError, GppError
from gpp.graph.captured import ITEMS, Items, Kind, is_loss, ref
from gpp.graph.order import fresh_name

_MEAN, _SUM = 1, 2
"""ATen's numbers of the reductions of a loss."""
_REDUCED = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
_DIVIDED, _MULTIPLIED = "aten.div.Tensor", "aten.mul.Tensor"
_HALF = ("float16", "bfloat16")
_BATCH, _TRIALS = 8, 8
_MOST_BYTES = 64 << 20
"""The most bytes that a number may take to be made; one that takes more (of one-hot labels) is left as it is."""


class ItemFinder:
    """The nodes of one program that follow from a mini-batch's rows alone, and what is done with them.

    Args:
        batch: the only size that the program runs at; None for any.
        outside: targets of inputs that are no user's (the outputs of a network whose loss alone is here).
    """

    def __init__(self, drafts: Drafts, batch: int | None, outside: Collection[str] = ()) -> None:
        self.drafts, self.batch = drafts, batch
        self.out: list[Draft] = []
        self.items: list[Items] = []
        self.taken = {draft.name for draft in drafts.drafts}
        self.draft = {draft.name: draft for draft in drafts.drafts}
        written = {name for draft in drafts.drafts if _writes(draft) for name in needs(draft)}
        self.alone: dict[str, bool] = {}
        self.counts: dict[str, bool] = {}
        for draft in drafts.drafts:
            read = needs(draft)
            leaf = draft.kind == "input" and draft.target not in outside
            held = draft.kind in ("buffer", "constant") and draft.name not in written
            called = draft.kind == "call" and not _writes(draft) and all(self.alone[n] for n in read)
            draws = called and is_random(operator_of(draft.target), draft.args, draft.kwargs)
            self.alone[draft.name] = leaf or held or (called and not draws)
            self.counts[draft.name] = leaf or any(self.counts[n] for n in read)

    def found(self) -> Drafts:
        """The program with given numbers in place of those that its losses are divided by.

        Found are means of cross entropy and of the negative log likelihood over labels, with weights of classes or without, and
        scalars that follow from inputs and targets alone, if something that does not is divided by them, or multiplied by their
        inverse.
        """
        given = {name: node for name, node in self.drafts.results.items() if name.startswith(ITEMS)}
        results = {name: node for name, node in self.drafts.results.items() if name not in given}
        for name, node in given.items():
            self._refuse_others(name, node)
        terms = {name.removeprefix(ITEMS): node for name, node in given.items()}
        losses = sorted(filter(is_loss, results))
        if unknown := sorted(set(terms) - {"", *losses}):
            raise CaptureError(f"items are given of {unknown}, and the loss has {losses}. Fix: name its terms in items=")
        counted = losses if "" in terms else [name for name in losses if name in terms]
        searched = needed_by(self.draft, [node for name, node in results.items() if name not in counted])
        for draft in self.drafts.drafts:
            if draft.name in searched and draft.kind == "call":
                self._look(draft)
            self.out.append(draft)
        for name in counted:
            results[name] = self._shared(name, results[name], terms.get(name) or terms[""])
        return Drafts(
            drafts=self.out,
            results=results,
            constants=self.drafts.constants,
            aliases=self.drafts.aliases,
            items=tuple(self.items),
        )

    def _refuse_others(self, name: str, node: str) -> None:
        if not self.alone[node] or not self.counts[node]:
            raise CaptureError(
                f"the number of {name.removeprefix(ITEMS) or 'the loss'}'s items does not follow from inputs and targets alone. "
                "Fix: count labels or masks in items=, as lambda inputs, targets: (targets != -100).sum()"
            )

    def _look(self, draft: Draft) -> None:
        """Put the nodes that are needed before a node, and change it, if it is a mean over items."""
        if draft.target in _REDUCED:
            self._reduced(draft)
        elif draft.target in (_DIVIDED, _MULTIPLIED) and len(draft.args) == 2:
            for at in (1,) if draft.target == _DIVIDED else (1, 0):
                self._scaled(draft, at)

    def _reduced(self, draft: Draft) -> None:
        """A mean of a loss over labels becomes its sum, divided by the given number of labels."""
        given = bound_arguments(operator_of(draft.target), list(draft.args), dict(draft.kwargs))
        label, weight = ref(given["target"]), ref(given.get("weight"))
        if given["reduction"] != _MEAN or label is None or not self.counts[label] or not self.alone[label]:
            return
        if "float" in (self.draft[label].dtype or "float") or (weight is not None and not self.alone[weight]):
            return
        counted = self._number_of_labels(draft, label, weight, given["ignore_index"])
        number = self._given(draft, counted, "sum", "float64" if draft.dtype == "float64" else "float32")
        own, name = replace(draft), fresh_name(f"{draft.name}_sum", self.taken)
        own.name, own.args, own.kwargs = name, list(given.values()), {}
        own.args[list(given).index("reduction")] = _SUM
        self.out.append(own)
        draft.target, draft.args, draft.kwargs = _DIVIDED, [{"ref": name}, {"ref": number}], {}
        if draft.dtype in _HALF:
            # A number of labels has more digits than the type of the loss.
            wide = self._call(draft, "mean", _DIVIDED, draft.args, (), "float32")
            draft.target, draft.args = "aten._to_copy.default", [{"ref": wide}]
            draft.kwargs = {"dtype": {"dtype": draft.dtype}}

    def _number_of_labels(self, draft: Draft, label: str, weight: str | None, ignored: int) -> str:
        """The node of the number of labels that count, or of the weights of their classes."""
        shape = self.draft[label].shape
        counts = self._call(draft, "counts", "aten.ne.Scalar", [{"ref": label}, ignored], shape, "bool")
        if weight is not None:
            known = self._call(draft, "classes", "aten.mul.Tensor", [{"ref": label}, {"ref": counts}], shape, "int64")
            dtype = self.draft[weight].dtype
            weights = self._call(draft, "weights", "aten.take.default", [{"ref": weight}, {"ref": known}], shape, dtype)
            counts = self._call(draft, "weighted", "aten.mul.Tensor", [{"ref": weights}, {"ref": counts}], shape, dtype)
            return self._call(draft, "items", "aten.sum.default", [{"ref": counts}], (), dtype)
        return self._call(draft, "items", "aten.sum.default", [{"ref": counts}], (), "int64")

    def _scaled(self, draft: Draft, at: int) -> None:
        """Exchange a scalar operand of rows alone by the given one of the whole mini-batch."""
        scalar, other = ref(draft.args[at]), ref(draft.args[1 - at])
        if scalar is None or other is None or self.alone[other] or not self.alone[scalar] or not self.counts[scalar]:
            return
        if self.draft[scalar].shape != () or (kind := self._kind(scalar, divides=draft.target == _DIVIDED)) is None:
            return
        dtype = self.draft[scalar].dtype or "float32"
        dtype = dtype if "float" in dtype else draft.dtype or "float32"
        draft.args = [{"ref": self._given(draft, scalar, kind, dtype)} if i == at else a for i, a in enumerate(draft.args)]

    def _kind(self, node: str, *, divides: bool) -> Kind | None:
        """Whether a number (or its inverse) adds up over the parts of a batch, or is the mean of those of its parts."""
        for trial in range(_TRIALS):
            try:
                whole, *halves = self._numbers(node, trial)
            except (GppError, RuntimeError, IndexError, ValueError, TypeError):
                return None
            if not all(math.isfinite(number) and number for number in (whole, *halves)):
                continue
            if not divides and near(1 / whole, sum(1 / half for half in halves)):
                return "inverse"
            if divides and near(whole, sum(halves)):
                return "sum"
            if near(whole, sum(halves) / 2):
                return "mean"
        return None

    def _numbers(self, node: str, trial: int) -> Iterator[float]:
        """A number on made-up rows, and on their halves."""
        size = self.batch or _BATCH
        names = needed_by(self.draft, [node])
        needed = [draft for draft in self.drafts.drafts if draft.name in names]
        extents = [sizes_of(draft, size) for draft in needed]
        if sum(8 * math.prod(shape) for shape in extents) > _MOST_BYTES or (self.batch and size % 2):
            raise ValueError("too large to be tried")
        random = torch.Generator("cpu").manual_seed(trial)
        leaves = {d.name: _made_up(shape, d, random) for d, shape in zip(needed, extents, strict=True) if d.kind != "call"}
        for lo, hi in ((0, size), (0, size // 2), (size // 2, size)):
            values: dict[str, Any] = {
                name: tensor.narrow(self.draft[name].batch_dim or 0, lo, hi - lo) if self.draft[name].kind == "input" else tensor
                for name, tensor in leaves.items()
            }
            for draft in needed:
                if draft.kind == "call":
                    values[draft.name] = called(draft, values.__getitem__, hi - lo)
            yield float(values[node])

    def _shared(self, name: str, result: str, node: str) -> str:
        """A loss times the part of the mini-batch's items that a micro-batch has, by a number that the user counts; its node."""
        draft = self.draft[result]
        share = self._given(draft, node, "share", "float64" if draft.dtype == "float64" else "float32", of=name)
        none = self._call(draft, "none", "aten.eq.Scalar", [{"ref": share}, 0], (), "bool")
        # A mean over no items is not a number, and is to count for nothing.
        some = self._call(draft, "some", "aten.masked_fill.Scalar", [{"ref": result}, {"ref": none}, 0], (), draft.dtype)
        return self._call(draft, "shared", "aten.mul.Tensor", [{"ref": some}, {"ref": share}], (), draft.dtype)

    def _given(self, like: Draft, counted: str, kind: Kind, dtype: str, of: str = "") -> str:
        """The node of a number that is given with the rows of a micro-batch."""
        name = fresh_name(f"{like.name}_number", self.taken)
        column = Draft(
            name=fresh_name(ITEMS + name, self.taken),
            kind="input",
            target=ITEMS + name,
            shape=(self.batch or "b",),
            dtype=dtype,
            batch_dim=0,
            in_loss=like.in_loss,
        )
        self.out.append(column)
        self.items.append(Items(name=column.target, node=counted, kind=kind, dtype=dtype, of=of))
        # Each row has the number, so that any cut of the rows has it.
        return self._call(like, None, "aten.select.int", [{"ref": column.name}, 0, 0], (), dtype, name=name)

    def _call(
        self, like: Draft, what: str | None, target: str, args: list[Any], shape: Any, dtype: str | None, name: str | None = None
    ) -> str:
        """A new call in the place of another, named after it."""
        made = Draft(
            name=name or fresh_name(f"{like.name}_{what}", self.taken),
            kind="call",
            target=target,
            args=args,
            shape=shape,
            dtype=dtype,
            module=like.module,
            where=like.where,
            in_loss=like.in_loss,
        )
        made.batch_dim = next((i for i, extent in enumerate(shape or ()) if extent == (self.batch or "b")), None)
        self.out.append(made)
        self.draft[made.name] = made
        self.alone[made.name] = self.counts[made.name] = True
        return made.name


def _writes(draft: Draft) -> bool:
    return draft.kind == "call" and writes(operator_of(draft.target))


def _made_up(shape: list[int], draft: Draft, random: torch.Generator) -> Tensor:
    dtype = dtype_of(draft.dtype or "float32")
    if dtype.is_floating_point:
        return torch.rand(shape, generator=random, device="cpu").to(dtype)
    return torch.randint(2, shape, generator=random, device="cpu").to(dtype)
