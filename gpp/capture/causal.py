"""Masks of attention that say what attention knows by itself: that it is causal, or that nothing is masked.

Transformers makes a mask for `torch.export` that it leaves out in a run, and others build one from `torch.tril` in their forward.
Such a mask costs memory in every layer, hides from a card that flash attention would do, and that half of the work is none. Where
nothing but sizes decides a mask, it is computed here, and attention is told in its place. The results are those of the mask: what
it leaves out has the weight exp(-inf) = 0 either way (`python -m tests.checks.flops --masks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpp.capture.codec import called, dtype_of, is_random, operator_of, sizes_of, writes
from gpp.capture.draft import Draft, Drafts
from gpp.graph.captured import closure, node_references

_ATTENTION = "aten.scaled_dot_product_attention.default"
_OF_SHAPE = ("_like.", ".new_ones.", ".new_zeros.", ".new_full.")
"""Parts of targets that read the shape of their first argument alone."""
_MASK, _IS_CAUSAL = 3, 5
_MOST = 1 << 22
"""Elements of a mask that is computed for many samples, to see that their number does not change it."""


def with_causal(drafts: Drafts, batch: int | None) -> Drafts:
    """The drafts with attention told what its masks say.

    Args:
        batch: the only size that the model runs at; None for any.
    """
    named = {draft.name: draft for draft in drafts.drafts}
    known: dict[str, bool | None] = {}
    for draft in drafts.drafts:
        if draft.target != _ATTENTION or (name := _mask(draft)) is None:
            continue
        if name not in known:
            known[name] = _causal(named, name, batch)
        if known[name] is not None:
            draft.kwargs.pop("attn_mask", None)
            draft.kwargs.pop("is_causal", None)
            draft.args = [*draft.args[:_MASK], None, *(draft.args[_MASK + 1 : _IS_CAUSAL] or [0.0]), known[name]]
    return drafts


def _mask(draft: Draft) -> str | None:
    """The node of an attention's mask; None without one, or where it is causal beside it."""
    mask = draft.args[_MASK] if len(draft.args) > _MASK else draft.kwargs.get("attn_mask")
    causal = draft.args[_IS_CAUSAL] if len(draft.args) > _IS_CAUSAL else draft.kwargs.get("is_causal", False)
    return mask["ref"] if isinstance(mask, dict) and "ref" in mask and not causal else None


def _read(draft: Draft) -> Iterator[str]:
    """Nodes whose values a call reads; not those of which it reads the shape alone."""
    if not any(part in draft.target for part in _OF_SHAPE):
        yield from node_references(draft)


def _causal(named: dict[str, Draft], name: str, batch: int | None) -> bool | None:
    """Whether a mask that follows from sizes is causal (True) or lets everything through (False); None for any other."""
    apart = math.prod(sizes_of(named[name], 1))
    sizes = (batch,) if batch else (2, 3, max(2, min(1024, _MOST // max(1, apart))))
    above = closure([name], lambda other: _read(named[other]))
    if not all(named[other].kind == "call" and not named[other].after and _decided(named[other]) for other in above):
        return None
    order = [draft for draft in named.values() if draft.name in above]
    found = {_kind(_computed(named, order, size)) for size in sizes}
    return found.pop() if len(found) == 1 else None


def _decided(draft: Draft) -> bool:
    """Whether a call gives the same at every time, and knows the number of samples from shapes and positions alone."""
    operator, args = operator_of(draft.target), [*draft.args, *draft.kwargs.values()]
    counts = any(isinstance(arg, dict) and "size" in arg for arg in args) and not draft.target.startswith("aten.arange")
    return not (counts or writes(operator) or is_random(operator, draft.args, draft.kwargs))


def _computed(named: dict[str, Draft], order: list[Draft], size: int) -> Tensor:
    """The value of the last call for so many samples."""
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        if name not in values:  # its shape is read alone
            values[name] = torch.zeros(1, dtype=dtype_of(named[name].dtype or "float32")).expand(sizes_of(named[name], size))
        return values[name]

    for draft in order:
        values[draft.name] = called(draft, value, size)
    return values[order[-1].name]


def _kind(mask: Tensor) -> bool | None:
    """Of a mask [..., queries, keys], true or 0 where a pair may meet: see `_causal`."""
    if mask.dim() < 2:
        return None
    met = mask
    if mask.dtype != torch.bool:
        out = mask <= torch.finfo(mask.dtype).min  # what adds it to scores gets -inf, or no more than the least number
        met = ~out
        if bool((mask[met] != 0).any()):
            return None
    if bool(met.all()):
        return False
    queries, keys = mask.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    return True if queries == keys and bool((met == causal).all()) else None
