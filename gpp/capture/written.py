"""Parameters, buffers and inputs that a forward writes into, and copies for what reads them.

A later write, by the same forward or by that of the next micro-batch, is not to change what a backward has kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpp.capture.codec import GETITEM, operator_of
from gpp.capture.draft import Draft, Drafts
from gpp.graph.captured import node_references, references, renamed
from gpp.graph.order import fresh_name

_CLONE = "aten.clone.default"
_STATISTICS = ("running_mean", "running_var")
"""Arguments that operators of normalisation update, although their schemas do not say so."""


def with_copies(drafts: Drafts) -> tuple[Drafts, tuple[str, ...]]:
    """Let what reads a parameter, a buffer or a constant that is written into read a copy; and let an input that is written into be
    a copy from the beginning, so that the user's batch stays as it is.

    Returns:
        The drafts, and a note for each such input.
    """
    owner, written = _written(drafts)
    if not written:
        return drafts, ()
    inputs = {draft.name: draft for draft in drafts.drafts if draft.kind == "input" and draft.name in written}
    taken = {draft.name for draft in drafts.drafts}
    out: list[Draft] = []
    given: dict[str, str] = {}  # an input -> its copy
    kept: dict[tuple[str, int], str] = {}  # a tensor, and the writes into its owner so far -> its copy
    writes: Counter[str] = Counter()

    def copy(source: Draft, reader: Draft) -> str:
        made = Draft(name=fresh_name(f"{source.name}_copy", taken), kind="call", target=_CLONE, args=[{"ref": source.name}])
        form = {"shape": source.shape, "dtype": source.dtype, "batch_dim": source.batch_dim}
        out.append(replace(made, **form, module=reader.module, where=reader.where, in_loss=reader.in_loss))
        return made.name

    named = {draft.name: draft for draft in drafts.drafts}
    for draft in drafts.drafts:
        given |= {name: copy(inputs[name], draft) for name in set(node_references(draft)) & set(inputs) - set(given)}
        draft = _referring(draft, given, "read", "shared", "written", "updated")
        new: dict[str, str] = {}
        if draft.kind == "call" and not draft.no_grad and draft.target != _CLONE:
            for name in _nodes(draft, "read"):
                leaf = owner.get(name)
                if leaf in written and leaf not in inputs:
                    key = name, writes[leaf]
                    if key not in kept:
                        kept[key] = copy(named[name], draft)
                    new[name] = kept[key]
        writes.update(owner[name] for name in _nodes(draft, "written") if name in owner)
        out.append(_referring(draft, new, "read"))
    notes = tuple(
        f"the forward writes into {draft.target.removeprefix('target:')}, into a copy of it here: the batch that the program gives "
        "stays as it is"
        for draft in inputs.values()
    )
    return replace(drafts, drafts=out, results={key: given.get(name, name) for key, name in drafts.results.items()}), notes


def _arguments(draft: Draft) -> Iterator[tuple[str, str | None, Any]]:
    """The arguments of a call: (what becomes of it, its keyword, its value).

    It is `read`, `shared` where the result has its memory, `written`, or `updated` without a word in the schema.
    """
    operator: Any = operator_of(draft.target) if draft.kind == "call" else None
    schema = getattr(operator, "_schema", None)
    known = {key: argument for number, argument in enumerate(schema.arguments) for key in (number, argument.name)} if schema else {}

    def what(key: int | str) -> str:
        argument = known.get(key)
        if argument is None:
            return "shared" if draft.target == GETITEM else "read"
        if argument.alias_info is None:
            return "updated" if argument.name in _STATISTICS else "read"
        return "written" if argument.alias_info.is_write else "shared"

    for position, value in enumerate(draft.args):
        yield what(position), None, value
    for key, value in draft.kwargs.items():
        yield what(key), key, value


def _nodes(draft: Draft, *kinds: str) -> list[str]:
    """The nodes in the arguments of which one of these becomes."""
    return [name for kind, _, value in _arguments(draft) if kind in kinds for name in references(value)]


def _written(drafts: Drafts) -> tuple[dict[str, str], set[str]]:
    """Node -> the user's tensor whose memory it has; and those tensors that somebody writes into."""
    owner: dict[str, str] = {}
    written: set[str] = set()
    for draft in drafts.drafts:
        if draft.kind != "call":
            owner[draft.name] = draft.name
            continue
        owner.update((draft.name, owner[name]) for name in _nodes(draft, "shared", "written") if name in owner)
        written.update(owner[name] for name in _nodes(draft, "written") if name in owner)
    return owner, written


def _referring(draft: Draft, names: Mapping[str, str], *kinds: str) -> Draft:
    """A draft that refers to other nodes in the arguments of which one of `kinds` becomes."""
    if set(names).isdisjoint(node_references(draft)):
        return draft
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for kind, key, value in _arguments(draft):
        value = renamed(value, names) if kind in kinds else value
        if key is None:
            args.append(value)
        else:
            kwargs[key] = value
    return replace(draft, args=args, kwargs=kwargs)
