"""Capture: any `nn.Module` with its loss and metrics becomes a `Captured`.

Example, an input that forks (two towers that meet in a sum) becomes an operator graph with a fork:

    tower_a ─┐
             ├─► add ─► loss
    tower_b ─┘
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from gpp.capture.added import MeasuredModel, capture_part, declaring
from gpp.capture.causal import with_causal
from gpp.capture.counts import needed_by, needs
from gpp.capture.coupling import cut_loss
from gpp.capture.draft import Draft, Drafts, Reader
from gpp.capture.faithful.compared import compared
from gpp.capture.items import ItemFinder
from gpp.capture.measure import Facts, MeasuredPass
from gpp.capture.merge import Merger, NodeGroups
from gpp.capture.trace import trace
from gpp.capture.transients import MeasuredTransients
from gpp.capture.written import with_copies
from gpp.errors import CaptureError, InvalidConfig, counted
from gpp.graph.captured import Captured, Derived, Node, Uncounted, closure, is_loss, is_row, loss_nodes, node_references, references
from gpp.graph.op_graph import Input, Op, OpGraph, Param, bits, dtype_bytes
from gpp.graph.op_graph import Tensor as GraphTensor
from gpp.models.losses import Loss, Measure, module_of, untrained

MEASURED_BATCH = 8
SMALL = 0.01
"""Share of the bytes that a model moves up to which an operator of torch's without a formula counts by its bytes."""

FEW = 4
"""Parameters without a gradient that a warning names."""

_SWITCHED = re.compile(r"dropout|scaled_dot_product_attention|lstm|gru|rnn_|rrelu")
"""Random operators that draw nothing in evaluation."""

# operator name -> kind; the first pattern that fits decides
_KINDS = (
    (r"attention", "attention"),
    (r"embedding", "embedding"),
    (r"conv", "conv"),
    (r"norm", "norm"),
    (r"loss", "loss"),
    (r"linear|matmul|\bmm\b|grouped_mm|bmm|einsum|addmm|bilinear", "linear"),
    (r"lstm|gru|rnn", "recurrent"),
    (r"dropout", "dropout"),
    (r"relu|gelu|silu|sigmoid|tanh|softmax|elu", "activation"),
    (r"pool", "pool"),
    (r"view|reshape|transpose|permute|slice|select|getitem|expand|squeeze|flatten|chunk|split|contiguous|clone|cat|stack", "shape"),
)


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any] | tuple[Any, ...],
    targets: Tensor | Mapping[str, Tensor],
    loss: Loss,
    metrics: Mapping[str, Measure] | None = None,
    *,
    name: str,
    batch: int | None = None,
    items: Mapping[str, Callable[..., Any]] | None = None,
    imports: tuple[str, ...] = (),
) -> Captured:
    """Capture model, loss and metrics, each module in the mode that it is in, and compare them with the model itself.

    Parameters may be on the meta device; then nothing of their size is allocated, and nothing can be compared.

    Args:
        inputs: example tensors, batch first, at least two samples; a dict is passed by keyword, a tuple by position. Containers
            of them are taken apart, and booleans, numbers, words and None are constants (`gpp.capture.given`).
        targets: example targets, batch first; a single tensor is named `target`.
        loss: (outputs, targets) -> scalar mean over the samples, or a dict of such terms whose sum is the loss;
            `targets` is the tensor itself where there is one target, else the dict.
        metrics: name -> function like `loss`.
        name: name of the model.
        batch: size to capture at if the model works at a single batch size only; default: the examples'.
        items: name of a loss term, or an empty one for all -> function (inputs, targets) -> the number that the term is a mean
            over, where that is not recognised (`gpp.capture.items`); of one input or target it gets the tensor, of several a dict.
        imports: modules that register operators of the user's own, beside those that are found (`gpp.capture.homes`).

    Raises:
        CaptureError: the model cannot be captured, or what was captured computes other numbers; the message names the operation,
            the user's line and the fix.
        InvalidConfig: the examples are unusable.
    """
    named = {"target": targets} if isinstance(targets, Tensor) else dict(targets)
    if batch is not None and batch < 1:
        raise InvalidConfig("batch", batch, "must be an integer of at least 1", "leave it out")
    began = time.perf_counter()
    traced = trace(model, inputs, named, loss, metrics or {}, items, batch=batch)
    drafts, copied = with_copies(Reader(traced, model, module_of(loss), imports).read())
    drafts = with_causal(ItemFinder(drafts, traced.batch).found(), traced.batch)
    try:
        captured = assemble(drafts, name=name, inputs=traced.inputs, batch=traced.batch, warnings=(*traced.warnings, *copied))
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        what = str(error).split(". Hint")[0]
        raise CaptureError(f"the model writes into a tensor that its backward reads: {what}. Fix: write into a copy") from error
    known = captured.graph.param_of
    lost = [name for name, _ in model.named_parameters() if captured.aliases.get(name, name) not in known]
    few = ", ".join([*lost[:FEW], *(["..."] if len(lost) > FEW else [])])
    notes = [f"no operation reads {few}: {counted(len(lost), 'parameter')} without a gradient"] if lost else []
    notes += [
        f"the loss reads parameters of {name}, which stay as they are: it is not the module of the loss. To train them, give that "
        "module as the loss, or one that holds it"
        for name in untrained(loss, model)
    ]
    captured = replace(captured, warnings=(*captured.warnings, *notes))
    return compared(captured, model, inputs, named, loss, capture_s=time.perf_counter() - began)


def assemble(
    drafts: Drafts,
    *,
    name: str,
    inputs: tuple[str, ...],
    batch: int | None,
    warnings: tuple[str, ...],
    blocks: Mapping[str, tuple[list[Tensor], Facts]] | None = None,
) -> Captured:
    """Operators and their costs from drafts; `blocks` as `MeasuredPass` takes them."""
    size = batch or MEASURED_BATCH
    known = MeasuredPass(drafts.drafts, loss_nodes(drafts.results), size, blocks=blocks).run()
    groups = Merger(drafts.drafts, known, drafts.results).merge()
    for draft in drafts.drafts:
        if draft.kind != "param":
            draft.requires_grad = known[draft.name].requires_grad
    graph = OpCosts(drafts, known, groups, size).graph(name)
    named = {draft.name: draft for draft in drafts.drafts}
    counted = needed_by(named, [item.node for item in drafts.items])
    kept = [draft for draft in drafts.drafts if draft.name in groups.live or draft.name in counted or draft.kind == "input"]
    noisy = [draft for draft in kept if draft.kind == "call" and known[draft.name].random and not _SWITCHED.search(draft.target)]
    notes = tuple(
        f"{draft.target} at {draft.where} draws random numbers and has no training switch: evaluation draws them too"
        for draft in noisy
    )
    moved = max(1, sum(known[draft.name].traffic_bytes for draft in kept))
    unknown = [
        Uncounted(node=draft.name, operator=operator, where=draft.where, share=known[draft.name].traffic_bytes / moved)
        for draft in kept
        for operator in known[draft.name].unknown
    ]
    large = tuple(one for one in unknown if one.share > SMALL or not one.operator.startswith(("aten.", "prims.")))
    notes += tuple(
        f"{one.operator} at {one.where} has no formula of its FLOPs: its time is that of the bytes that it moves, "
        f"{one.share:.2%} of the model's. cost=profiled measures it"
        for one in unknown
        if one not in large
    )
    captured = Captured(
        name=name,
        nodes=tuple(Node(**{slot: getattr(draft, slot) for slot in Node.__slots__}) for draft in kept),
        inputs=inputs,
        results=drafts.results,
        graph=graph,
        constants={key: value for key, value in drafts.constants.items() if key in groups.live | counted},
        batch=batch,
        aliases=drafts.aliases,
        warnings=(*warnings, *dict.fromkeys(notes)),
        loss_ops=_loss_ops(graph, groups, drafts, known),
        derived=tuple(
            Derived(node=draft.name, params=tuple(sorted(known[draft.name].derived)), where=draft.where)
            for draft in kept
            if known[draft.name].derived
        ),
        items=drafts.items,
        uncounted=large,
    )
    return declaring(replace(captured, **cut_loss(captured)._asdict()))


def _loss_ops(graph: OpGraph, groups: NodeGroups, drafts: Drafts, facts: dict[str, Facts]) -> tuple[str, ...]:
    """Operators that compute a part of the loss, and all operators behind them.

    The network's last operator stays the network's, even if a view of the loss has joined it.
    """
    of_loss = {draft.name for draft in drafts.drafts if draft.in_loss and not facts[draft.name].view}
    first = [i for i, names in enumerate(groups.groups) if of_loss & set(names)]
    found = {*first, *(j for i in first for j in bits(graph.descendants[i]))}
    return tuple(graph.ops[i].name for i in sorted(found))


class OpCosts:
    """Names, kinds, costs per sample and edges of the operators; `facts` hold for `batch` samples, and passes of the type
    `passes` (`Captured`)."""

    def __init__(self, drafts: Drafts, facts: dict[str, Facts], groups: NodeGroups, batch: int, passes: str | None = None) -> None:
        self.drafts, self.facts, self.groups, self.batch, self.passes = drafts, facts, groups, batch, passes
        self.draft = {draft.name: draft for draft in drafts.drafts}
        self.index = {draft.name: i for i, draft in enumerate(drafts.drafts)}
        self.maker: dict[int, Draft] = {}
        self.reading: dict[str, list[str]] = defaultdict(list)  # node -> targets of its readers
        for draft in drafts.drafts:
            for storage in facts[draft.name].storages:
                self.maker.setdefault(storage, draft)
            for need in needs(draft):
                self.reading[need].append(draft.target)
        self.closures = [self._closure(names) for names in groups.groups]
        # `loss`, or `loss.NAME` for each term; a node of several terms is called after the first
        self.losses: dict[str, str] = {}
        for name, node in drafts.results.items():
            if is_loss(name):
                self.losses.setdefault(node, name.replace(":", "."))

    def _closure(self, names: list[str]) -> list[str]:
        """A group's nodes with the free nodes and leaves that they need, in execution order."""

        def beside(name: str) -> list[str]:
            needed = [self.draft[need] for need in needs(self.draft[name])]
            return [draft.name for draft in needed if draft.free or draft.kind not in ("call", "block")]

        return sorted(closure(names, beside), key=self.index.__getitem__)

    def graph(self, name: str) -> OpGraph:
        """The operator graph."""
        saved, kept = self._saved()
        dtype = self._dtype()
        names, tensors = self._names(), self._tensors(saved, dtype)
        transients, given = (
            MeasuredTransients(self.draft, self.facts, self.batch, self.passes),
            {*self.losses, *(tensor.name for tensor in tensors)},
        )
        charged: set[str] = set()
        left, late = self._late()
        ops = []
        for number, held in enumerate(self.closures):
            # a free node is computed once per stage; charging its first reader keeps the sum right
            own = [n for n in held if n not in charged and self.draft[n].kind in ("call", "block")]
            charged.update(own)
            facts = [self.facts[n] for n in own]
            beyond = transients.of(held, given, kept[number])
            ops.append(
                Op(
                    name=names[number],
                    kind=self._kind(number),
                    nodes=tuple(self.groups.groups[number]),
                    forward_flops=sum(f.forward_flops for f in facts) / self.batch,
                    backward_flops=sum(f.backward_flops for f in facts) / self.batch,
                    traffic_bytes=sum(f.traffic_bytes for f in facts) / self.batch,
                    num_kernels=sum(not f.view for f in facts),
                    saved_bytes=kept[number] / self.batch,
                    weight_flops=sum(self.facts[n].weight_flops for n in own if n in left) / self.batch,
                    late_bytes=late.get(number, 0) / self.batch,
                    transient_bytes=beyond.per_sample,
                    fixed_bytes=beyond.fixed,
                    params=self._params(held),
                    inputs=tuple(self.draft[n].target for n in held if is_row(self.draft[n])),
                )
            )
        used = {name for op in ops for name in op.params}
        params = tuple(self._param(draft) for draft in self.drafts.drafts if draft.kind == "param" and draft.target in used)
        params += tuple(self._copied(param) for param in params if self._copy_name(param.name) in used)
        inputs = tuple(
            Input(name=draft.target, bytes_per_sample=self.facts[draft.name].num_bytes / self.batch)
            for draft in self.drafts.drafts
            if is_row(draft)
        )
        return OpGraph(name=name, ops=tuple(ops), tensors=tensors, params=params, inputs=inputs, dtype=dtype)

    def _params(self, held: list[str]) -> tuple[str, ...]:
        """The parameters that an operator reads, and the copies of those that its passes read in their own type."""
        narrow = {need for name in held for need in self.draft[name].narrow}
        own = [name for name in held if self.draft[name].kind == "param"]
        copies = [self._copy_name(self.draft[name].target) for name in own if name in narrow]
        return (*(self.draft[name].target for name in own), *copies)

    def _copy_name(self, param: str) -> str:
        return f"{param} in {self.passes}"

    def _copied(self, param: Param) -> Param:
        """The copy of a parameter in the type of the passes."""
        size = param.num_bytes * dtype_bytes(self.passes or "") // dtype_bytes("float32")
        return Param(name=self._copy_name(param.name), num_bytes=size, trainable=False, copy_of=param.name)

    def _dtype(self) -> str:
        """The floating-point type of most parameters; without any, of the first such input."""
        floats = Counter(d.dtype for d in self.drafts.drafts if d.kind == "param" and "float" in (d.dtype or ""))
        given = [d.dtype for d in self.drafts.drafts if is_row(d) and "float" in (d.dtype or "")]
        return (floats.most_common(1)[0][0] if floats else (given or ["float32"])[0]) or "float32"

    def _param(self, draft: Draft) -> Param:
        others = tuple(alias for alias, name in self.drafts.aliases.items() if name == draft.target)
        targets = self.reading[draft.name]
        return Param(
            name=draft.target,
            num_bytes=self.facts[draft.name].num_bytes,
            trainable=draft.requires_grad,
            aliases=others,
            # Embeddings touch the rows that the samples name, not the whole table.
            gathered=bool(targets) and all("embedding" in target for target in targets),
        )

    def _saved(self) -> tuple[set[int], dict[int, int]]:
        """Storages kept for backward, and the bytes that each operator answers for.

        An operator answers for a storage that it made; the first keeper answers for one that was made inside a call
        or by a free node. Nobody answers for a user's input, whose rows are there anyhow.
        """
        seen: set[int] = set()
        kept: dict[int, int] = defaultdict(int)
        for number, held in enumerate(self.closures):
            for name in held:
                for storage, _, storage_bytes in self.facts[name].saved:
                    maker = self.maker.get(storage)
                    if storage not in seen and (maker is None or maker.kind != "input"):
                        seen.add(storage)
                        kept[self.groups.producer.get(maker.name, number) if maker else number] += storage_bytes
        return seen, kept

    def _late(self) -> tuple[Collection[str], Mapping[int, int]]:
        """Nodes whose gradients of weights can be left for later, and the bytes that each operator answers for meanwhile."""
        part = capture_part()
        if part is None:
            return (), {}
        calls = [draft.name for draft in self.drafts.drafts if draft.kind in ("call", "block") and draft.name in self.groups.live]
        # A draft has all that a node has.
        return part.left(MeasuredModel(self.draft, self.facts, calls, self.losses, self.closures))  # type: ignore[arg-type]

    def _tensors(self, saved: set[int], dtype: str) -> tuple[GraphTensor, ...]:
        producer, readers = self.groups.producer, defaultdict(set)
        for unit, number in producer.items():
            # What a writer has written is in the tensor that is read; the writer's own result crosses no edge for it.
            for need in node_references(self.draft[unit]):
                if need in producer and producer[need] != number:
                    readers[need].add(number)
        out = []
        for name in sorted(readers, key=self.index.__getitem__):
            facts = self.facts[name]
            out.append(
                GraphTensor(
                    name=name,
                    producer=producer[name],
                    consumers=tuple(sorted(readers[name])),
                    bytes_per_sample=facts.num_bytes / self.batch,
                    saved=bool(set(facts.storages) & saved),
                    differentiable=facts.requires_grad,
                    values=self._values(self.draft[name], dtype),
                )
            )
        return tuple(out)

    def _values(self, draft: Draft, dtype: str) -> Literal["real", "gelu", "other"]:
        """The kind of numbers that a node makes (`gpp.graph.op_graph.Tensor`). A view has those of what it looks at."""
        if draft.dtype not in (dtype, self.passes):
            return "other"
        while self.facts[draft.name].view and (parts := [self.draft[ref] for ref in references(draft.args)]):
            draft = parts[0]
        return "gelu" if draft.kind == "call" and "gelu" in draft.target else "real"

    def _main(self, number: int) -> Draft:
        """The node that an operator is named after: the loss, else most FLOPs, else the first that computes."""
        own = self.groups.groups[number]
        if made := [node for node in self.losses if node in own]:
            return self.draft[made[0]]
        named = [n for n in own if not self.draft[n].free]
        return self.draft[max(named, key=lambda n: (self.facts[n].forward_flops, not self.facts[n].view, -self.index[n]))]

    def _kind(self, number: int) -> str:
        main = self._main(number)
        if main.name in self.losses:
            return "loss"
        if main.kind == "block":
            return "block"
        return next((kind for pattern, kind in _KINDS if re.search(pattern, main.target)), "elementwise")

    def _names(self) -> list[str]:
        mains = [self._main(number) for number in range(len(self.groups.groups))]
        modules = [draft.module.split(".") for draft in self.drafts.drafts]
        parents = {".".join(parts[:i]) for parts in modules for i in range(1, len(parts))}
        shared = Counter(main.module for main in mains)
        taken: Counter[str] = Counter()
        out: list[str] = []
        for main in mains:
            path, short = main.module, main.target.split(".")[1] if main.kind == "call" else main.name
            parent = not path or path in parents
            if main.name in self.losses:
                wish = self.losses[main.name]
            elif main.kind == "block" or not (parent or shared[path] > 1):
                wish = path
            else:
                wish = f"{path}.{short}" if path else short
            taken[wish] += 1
            out.append(wish if taken[wish] == 1 else f"{wish}#{taken[wish]}")
        return out
