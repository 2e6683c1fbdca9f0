"""The second front end: a hand-written list of blocks, for models that torch.export cannot take.

On the command line it is `model=blocks` (`gpp.models.blocks`). Every block is one operator. A worker builds only its
own blocks, through their factories, and calls them. The loss and the metrics are captured as for any model, on the last
block's output.

Example, two encoders that meet in a head:

    capture_blocks([Block(name="text", factory="my.models.encoder", args=(30,), inputs=("ids",)),
                    Block(name="image", factory="my.models.encoder", args=(768,), inputs=("pixels",)),
                    Block(name="head", factory="my.models.Head", inputs=("text", "image"))],
                   {"ids": ids, "pixels": pixels}, targets, loss, name="my_model")
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from gpp.capture.build import MEASURED_BATCH, assemble
from gpp.capture.codec import GETITEM
from gpp.capture.draft import Draft, Drafts, batch_dimension, read, tied_names
from gpp.capture.emit import import_factory
from gpp.capture.flops import Counted
from gpp.capture.items import with_items
from gpp.capture.measure import Derivations, Facts, form_of, measure
from gpp.capture.trace import example_batch, resized, trace
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import Captured, loss_nodes, renamed
from gpp.models.blocks import Block
from gpp.models.losses import Loss, Measure

_OTHER_BATCH = 3


def capture_blocks(
    blocks: Sequence[Block],
    inputs: Mapping[str, Tensor],
    targets: Tensor | Mapping[str, Tensor],
    loss: Loss,
    metrics: Mapping[str, Measure] | None = None,
    *,
    name: str,
    imports: tuple[str, ...] = (),
) -> Captured:
    """Capture a list of blocks; the arguments are those of `gpp.capture.build.capture`.

    Costs are measured on fake tensors, and on real ones of a small batch where a block does not run on fake ones.

    Raises:
        InvalidConfig: a name occurs twice, an input is unknown, or the examples are unusable.
        CaptureError: a block's factory, a block's output or the loss cannot be used.
    """
    named = {"target": targets} if isinstance(targets, Tensor) else dict(targets)
    example_batch({**inputs, **{f"target:{key}": value for key, value in named.items()}})
    known = set(inputs)
    for block in blocks:
        if block.name in known or not all(part.isidentifier() for part in block.name.split(".")):
            raise InvalidConfig("block", block.name, "names must be unique identifiers", "rename it")
        if missing := [item for item in block.inputs if item not in known]:
            raise InvalidConfig(
                f"block {block.name}.inputs", missing, "must be model inputs or earlier blocks", f"choose from {sorted(known)}"
            )
        known.add(block.name)
    return _Builder(blocks, dict(inputs), named, loss, metrics or {}, imports).build(name)


def _make(block: Block) -> nn.Module:
    return import_factory(block.factory)(*block.args, **block.kwargs)


class _Builder:
    """Drafts and facts of blocks, then those of the loss, in one list."""

    def __init__(
        self,
        blocks: Sequence[Block],
        inputs: dict[str, Tensor],
        targets: dict[str, Tensor],
        loss: Loss,
        metrics: Mapping[str, Measure],
        imports: tuple[str, ...],
    ) -> None:
        self.blocks, self.inputs, self.targets, self.loss, self.metrics = blocks, inputs, targets, loss, metrics
        self.imports = imports
        self.drafts: list[Draft] = []
        self.facts: dict[str, Facts] = {}
        self.aliases: dict[str, str] = {}
        self.storage = 0
        # for each block or input: names of its tensors, and their values at both batch sizes
        self.outputs: dict[str, list[str]] = {}
        self.values: dict[str, tuple[Tensor, Tensor]] = {}

    def build(self, name: str) -> Captured:
        """See `capture_blocks`."""
        for key, example in self.inputs.items():
            self._input(key, example)
        for block in self.blocks:
            self._block(block)
        last = self.outputs[self.blocks[-1].name]
        tail = _StandIn(len(last))
        examples = {f"outputs{i}": torch.zeros(self.values[n][0].shape, dtype=self.values[n][0].dtype) for i, n in enumerate(last)}
        targets = {key: resized(value, MEASURED_BATCH) for key, value in self.targets.items()}
        traced = trace(tail, examples, targets, self.loss, self.metrics, batch=None)
        if traced.batch is not None:
            raise CaptureError(f"the loss works at a fixed batch size only: {traced.warnings[0]}")
        drafts = with_items(read(traced, tail, imports=self.imports), None, outside=set(examples))
        return self._join(drafts, dict(zip(examples, last, strict=True)), name, traced.warnings)

    def _new_storage(self) -> int:
        self.storage -= 1  # negative: never equal to a storage that torch has made
        return self.storage

    def _add(self, draft: Draft, pair: tuple[Tensor, Tensor], **facts: Any) -> str:
        draft.shape = _shape(draft.name, *pair)
        draft.dtype = str(pair[0].dtype).removeprefix("torch.")
        draft.batch_dim = batch_dimension(draft.shape, None)
        self.drafts.append(draft)
        size = pair[0].numel() * pair[0].element_size()
        forms = [form_of(pair[0], facts.get("requires_grad", False))]
        self.facts[draft.name] = Facts(storages=(self._new_storage(),), num_bytes=size, forms=forms, **facts)
        return draft.name

    def _input(self, key: str, example: Tensor) -> None:
        pair = (resized(example, MEASURED_BATCH), resized(example, _OTHER_BATCH))
        self._add(Draft(name=key, kind="input", target=key), pair)
        self.outputs[key], self.values[key] = [key], pair

    def _block(self, block: Block) -> None:
        names = [tensor for item in block.inputs for tensor in self.outputs[item]]
        grads = [self.facts[n].requires_grad for n in names]
        module, pairs, facts = _measure(block, [self.values[n] for n in names], grads)
        params = self._parameters(block, module)
        facts.num_bytes = sum(pair[0].numel() * pair[0].element_size() for pair in pairs)
        facts.traffic_bytes = facts.num_bytes + sum(self.facts[n].num_bytes for n in names)
        facts.requires_grad = any(grads) or any(p.requires_grad for p in module.parameters())
        facts.forms = [form_of(pair[0], facts.requires_grad) for pair in pairs]
        facts.storages = (self._new_storage(),)
        facts.reads = tuple(storage for n in names for storage in self.facts[n].storages)
        # A block keeps its own storages for backward, and, since nobody can look inside, its inputs.
        facts.saved = [(self._new_storage(), amount, amount) for _, amount, _ in facts.saved]
        facts.saved += [(s, self.facts[n].num_bytes, self.facts[n].num_bytes) for n in names for s in self.facts[n].storages]
        spec = json.dumps([list(block.args), block.kwargs])
        draft = Draft(
            name=block.name,
            kind="block",
            target=block.factory,
            module=block.name,
            args=[{"ref": n} for n in names],
            kwargs={"spec": spec, "params": [{"ref": n} for n in params]},
            where=f"block {block.name}",
        )
        self.drafts.append(draft)
        self.facts[block.name] = facts
        if facts.parts is None:
            draft.shape = _shape(block.name, *pairs[0])
            draft.dtype, draft.batch_dim = str(pairs[0][0].dtype).removeprefix("torch."), batch_dimension(draft.shape, None)
            self.outputs[block.name], self.values[block.name] = [block.name], pairs[0]
            return
        self.outputs[block.name] = []
        for i, pair in enumerate(pairs):
            part = Draft(name=f"{block.name}.{i}", kind="call", target=GETITEM, args=[{"ref": block.name}, i], module=block.name)
            grad = facts.requires_grad and pair[0].is_floating_point()
            self.outputs[block.name].append(self._add(part, pair, view=True, requires_grad=grad, reads=facts.storages))
            self.values[part.name] = pair

    def _parameters(self, block: Block, module: nn.Module) -> list[str]:
        """Leaves for a block's parameters and buffers, tied ones once."""
        tied = tied_names(module)
        self.aliases |= {f"{block.name}.{a}": f"{block.name}.{b}" for a, b in tied.items()}
        out = []
        persistent = set(module.state_dict())
        for kind, tensors in (("param", module.named_parameters()), ("buffer", module.named_buffers())):
            for key, tensor in tensors:
                full = f"{block.name}.{key}"
                draft = Draft(
                    name=full,
                    kind=kind,
                    target=full,
                    shape=tuple(tensor.shape),
                    requires_grad=tensor.requires_grad,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    persistent=kind == "param" or key in persistent,
                )
                self.drafts.append(draft)
                self.facts[full] = Facts(storages=(self._new_storage(),), num_bytes=tensor.numel() * tensor.element_size())
                out.append(full)
        return out

    def _join(self, tail: Drafts, outputs: dict[str, str], name: str, warnings: tuple[str, ...]) -> Captured:
        """Append the loss's drafts; its inputs become references to the last block's tensors."""
        for draft in tail.drafts:
            if draft.target in outputs and self.facts[outputs[draft.target]].requires_grad:
                draft.requires_grad = True
        facts = measure(tail.drafts, loss_nodes(tail.results), MEASURED_BATCH)
        taken = {draft.name for draft in self.drafts}
        names = {d.name: outputs.get(d.target, d.name) if d.kind == "input" else d.name for d in tail.drafts}
        for draft in tail.drafts:
            if draft.kind == "input" and draft.target in outputs:
                for fact in facts.values():  # the loss keeps and reads the block's storage
                    _rename_storage(fact, facts[draft.name].storages[0], self.facts[outputs[draft.target]].storages[0])
        for draft in tail.drafts:
            if draft.kind == "input" and draft.target in outputs:
                continue
            if names[draft.name] in taken:
                names[draft.name] = f"loss.{draft.name}"
            self.facts[names[draft.name]] = facts[draft.name]
            draft.name, draft.args = names[draft.name], renamed(draft.args, names)
            draft.kwargs = renamed(draft.kwargs, names)
            self.drafts.append(draft)
        results = {key: names[node] for key, node in tail.results.items()}
        joined = Drafts(
            drafts=self.drafts,
            results=results,
            constants={names[k]: v for k, v in tail.constants.items()},
            aliases=self.aliases,
            items=tuple(replace(item, node=names[item.node]) for item in tail.items),
        )
        inputs = (*self.inputs, *(f"target:{key}" for key in self.targets))
        return assemble(joined, name=name, inputs=inputs, batch=None, warnings=warnings, facts=self.facts)


class _StandIn(nn.Module):
    """A stand-in for the whole model where only its loss is captured: it hands its inputs on."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, **outputs: Tensor) -> Any:
        """The single output, or the tuple of them."""
        values = tuple(outputs.values())
        return values[0] if self.num_outputs == 1 else values


def _rename_storage(facts: Facts, old: int, new: int) -> None:
    facts.storages, facts.reads, facts.writes = (
        tuple(new if s == old else s for s in part) for part in (facts.storages, facts.reads, facts.writes)
    )
    facts.saved = [(new if s == old else s, view, whole) for s, view, whole in facts.saved]


def _shape(name: str, one: Tensor, other: Tensor) -> tuple[Any, ...]:
    """Sizes of a tensor from its values at both batch sizes: fixed, the batch, or a multiple of it."""
    out: list[Any] = []
    for a, b in zip(one.shape, other.shape, strict=True):
        if a == b:
            out.append(a)
        elif a * _OTHER_BATCH == b * MEASURED_BATCH:
            out.append("b" if a == MEASURED_BATCH else ["mul", a // MEASURED_BATCH, "b"])
        else:
            raise CaptureError(
                f"{name} has size {a} for {MEASURED_BATCH} samples and {b} for {_OTHER_BATCH}; it must be fixed or "
                "a multiple of the batch"
            )
    return tuple(out)


def _measure(
    block: Block,
    values: list[tuple[Tensor, Tensor]],
    grads: list[bool],
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Facts]:
    """A block's module (without storage where possible), its outputs at both batch sizes, its cost."""
    try:
        with torch.device("meta"):
            module = _make(block)
        with FakeTensorMode(allow_non_fake_inputs=True):
            runs = [_run(block, module, [pair[i] for pair in values], grads) for i in range(2)]
    except CaptureError:
        raise
    except Exception:  # code that looks at data needs data
        try:
            module = _make(block)
            with torch.random.fork_rng(devices=[]):
                runs = [_run(block, module, [pair[i] for pair in values], grads) for i in range(2)]
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"block {block.name} ({block.factory}) does not run: {type(error).__name__}: {error}") from error
    return module, list(zip(runs[0][0], runs[1][0], strict=True)), runs[0][1]


def _run(block: Block, module: nn.Module, values: list[Tensor], grads: list[bool]) -> tuple[list[Tensor], Facts]:
    """A block's outputs on the meta device, and the counts of its forward and backward. Its tensors stay as they are."""
    args = [torch.zeros(value.shape, dtype=value.dtype) for value in values]
    for argument, grad in zip(args, grads, strict=True):
        argument.requires_grad_(grad)
    state = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    copies: dict[int, Tensor] = {}
    for tensor in state.values():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().clone()
        copies.setdefault(id(tensor), copy.requires_grad_(tensor.requires_grad))
    known = {t.untyped_storage()._cdata for t in (*copies.values(), *args)}
    facts, kept, derivations = Facts(), [], Derivations()
    for argument in args:
        derivations.add_input(argument)
    for name, tensor in state.items():
        if tensor.requires_grad:
            derivations.add_parameter(f"{block.name}.{name}", copies[id(tensor)])

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        facts.derived |= derivations.derived_from(tensor)
        if storage._cdata not in known:
            known.add(storage._cdata)
            facts.saved.append((0, storage.nbytes(), storage.nbytes()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), Counted() as forward, derivations:
        result = torch.func.functional_call(module, {key: copies[id(t)] for key, t in state.items()}, tuple(args))
    outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
    if not outputs or not all(isinstance(item, Tensor) for item in outputs):
        raise CaptureError(f"block {block.name} must return a tensor or a tuple of tensors, not {type(result).__name__}")
    ends = [item for item in outputs if item.requires_grad]
    leaves = [leaf for leaf in (*copies.values(), *args) if leaf.requires_grad]
    with Counted() as backward:
        if ends and leaves:
            torch.autograd.grad(ends, leaves, [torch.ones_like(item) for item in ends], allow_unused=True)
    facts.forward_flops, facts.backward_flops, facts.unknown = (
        forward.flops,
        backward.flops,
        tuple({**forward.unknown, **backward.unknown}),
    )
    facts.parts = None if isinstance(result, Tensor) else len(outputs)
    return [torch.empty(item.shape, dtype=item.dtype, device="meta") for item in outputs], facts
