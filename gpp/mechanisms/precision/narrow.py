"""A captured model whose passes run in a narrower type where `torch.autocast` has it so: types and bytes, as torch makes them.

    x ── linear(w) ── softmax ── layer_norm(g) ── linear(v)
         bfloat16     float32    float32          bfloat16     w and v are read in bfloat16, g is not

The nodes run once more on fake tensors, as in the capture, with forwards under autocast. So what a type does is torch's own to say:
which results are narrow, what is saved for the backward, and which weights are cast. A weight that is cast has one copy, which all
passes between two updates read (`gpp.capture.stage`); autograd would keep one for each micro-batch in flight.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Literal

from gpp.capture.added import declaring
from gpp.capture.build import MEASURED_BATCH, OpCosts
from gpp.capture.draft import Draft, Drafts
from gpp.capture.measure import Facts, MeasuredPass
from gpp.capture.merge import NodeGroups
from gpp.graph.captured import Captured, Node, loss_nodes, node_references
from gpp.mechanisms.precision.passes import PASSES


def narrowed(captured: Captured, passes: Literal["bfloat16", "float16"]) -> Captured:
    """The model with passes that cast to a type."""
    drafts = [Draft(**{slot: getattr(node, slot) for slot in Node.__slots__}) for node in captured.nodes]
    losses, batch = loss_nodes(captured.results), captured.batch or MEASURED_BATCH
    reads = narrow_reads(drafts, MeasuredPass(drafts, losses, batch, passes).run())
    for draft in drafts:
        draft.narrow = reads.get(draft.name, draft.narrow)
    facts = MeasuredPass(drafts, losses, batch, passes).run()
    for draft in drafts:
        if draft.kind in ("call", "block") and draft.dtype is not None:
            ((_, _, dtype), _), *_ = facts[draft.name].forms
            draft.dtype = str(dtype).removeprefix("torch.")
    groups = [list(op.nodes) for op in captured.graph.ops]
    free = {draft.name for draft in drafts if draft.free}
    producer = {name: number for number, names in enumerate(groups) for name in names if name not in free}
    whole = Drafts(drafts=drafts, results=captured.results, constants=captured.constants, aliases=captured.aliases)
    every = NodeGroups(groups=groups, live={draft.name for draft in drafts}, producer=producer)
    graph = OpCosts(whole, facts, every, batch, passes).graph(captured.graph.name)
    nodes = tuple(Node(**{slot: getattr(draft, slot) for slot in Node.__slots__}) for draft in drafts)
    return declaring(replace(captured, nodes=nodes, graph=graph, passes=passes))


def narrow_reads(drafts: list[Draft], facts: dict[str, Facts]) -> dict[str, tuple[str, ...]]:
    """Node -> the parameters that it casts, or of which it makes a view that all of its readers cast.

    Args:
        facts: of passes that are given parameters as they are.
    """
    kinds, readers = {draft.name: draft.kind for draft in drafts}, defaultdict[str, list[str]](list)
    found, cast = dict[str, tuple[str, ...]](), dict[str, set[str]]()
    for draft in drafts:
        for need in dict.fromkeys(node_references(draft)):
            readers[need].append(draft.name)
    for draft in reversed(drafts):
        if draft.kind != "call":
            continue
        own, wanted = facts[draft.name], readers[draft.name]
        if draft.free and own.view and wanted and all(draft.name in cast[reader] for reader in wanted):
            cast[draft.name] = set(node_references(draft))
        else:
            casts = set(own.casts) if PASSES.casts_itself(draft.target) else set[int]()
            cast[draft.name] = {need for need in node_references(draft) if casts & set(facts[need].storages)}
        weights = tuple(
            need for need in dict.fromkeys(node_references(draft)) if need in cast[draft.name] and kinds[need] == "param"
        )
        if weights:
            found[draft.name] = weights
    return found
