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
from gpp.capture.draft import Draft, Drafts, Reader, batch_dimension, tied_names
from gpp.capture.emit import import_factory
from gpp.capture.flops import Counted
from gpp.capture.items import ItemFinder
from gpp.capture.measure import Derivations, Facts
from gpp.capture.trace import example_batch, resized, trace
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import Captured, renamed
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
    made = _BlockDrafts(inputs)
    for block in blocks:
        made.add(block)
    last = made.outputs[blocks[-1].name]
    tail = _StandIn(len(last))
    forms = [made.values[tensor][0] for tensor in last]
    examples = {f"outputs{i}": torch.zeros(form.shape, dtype=form.dtype) for i, form in enumerate(forms)}
    measured = {key: resized(value, MEASURED_BATCH) for key, value in named.items()}
    traced = trace(tail, examples, measured, loss, metrics or {}, batch=None)
    if traced.batch is not None:
        raise CaptureError(f"the loss works at a fixed batch size only: {traced.warnings[0]}")
    drafts = ItemFinder(Reader(traced, tail, imports=imports).read(), None, outside=set(examples)).found()
    joined = _joined(made, drafts, dict(zip(examples, last, strict=True)))
    every = (*inputs, *(f"target:{key}" for key in named))
    return assemble(joined, name=name, inputs=every, batch=None, warnings=traced.warnings, blocks=made.runs)


class _BlockDrafts:
    """The drafts of inputs and blocks, in order.

    Attributes:
        outputs: block or input -> names of its tensors.
        values: name of a tensor -> its values at both batch sizes.
        runs: as `MeasuredPass` takes them.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.drafts: list[Draft] = []
        self.aliases: dict[str, str] = {}
        self.outputs: dict[str, list[str]] = {}
        self.values: dict[str, tuple[Tensor, Tensor]] = {}
        self.runs: dict[str, tuple[list[Tensor], Facts]] = {}
        self._grads: dict[str, bool] = {}
        for key, example in inputs.items():
            self._add(Draft(name=key, kind="input", target=key), (resized(example, MEASURED_BATCH), resized(example, _OTHER_BATCH)))
            self.outputs[key] = [key]

    def _add(self, draft: Draft, pair: tuple[Tensor, Tensor], *, grad: bool = False) -> None:
        """Add the draft of a tensor, by its values at both batch sizes."""
        draft.shape = _shape(draft.name, *pair)
        draft.dtype = str(pair[0].dtype).removeprefix("torch.")
        draft.batch_dim = batch_dimension(draft.shape, None)
        self.drafts.append(draft)
        self.values[draft.name], self._grads[draft.name] = pair, grad

    def add(self, block: Block) -> None:
        """Add a block, with its parameters and its results."""
        names = [tensor for item in block.inputs for tensor in self.outputs[item]]
        grads = [self._grads[n] for n in names]
        module, pairs, facts = _measure(block, [self.values[n] for n in names], grads)
        params = self._parameters(block, module)
        facts.requires_grad = any(grads) or any(p.requires_grad for p in module.parameters())
        self.runs[block.name] = [pair[0] for pair in pairs], facts
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
        if facts.parts is None:
            self._add(draft, pairs[0], grad=facts.requires_grad)
            self.outputs[block.name] = [block.name]
            return
        self.drafts.append(draft)
        self.outputs[block.name] = [f"{block.name}.{i}" for i in range(facts.parts)]
        for i, (name, pair) in enumerate(zip(self.outputs[block.name], pairs, strict=True)):
            part = Draft(name=name, kind="call", target=GETITEM, args=[{"ref": block.name}, i], module=block.name)
            self._add(part, pair, grad=facts.requires_grad and pair[0].is_floating_point())

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
                out.append(full)
        return out


def _joined(made: _BlockDrafts, tail: Drafts, outputs: Mapping[str, str]) -> Drafts:
    """The drafts of blocks and loss; the loss's inputs of `outputs` become references to the last block's tensors."""
    taken = {draft.name for draft in made.drafts}
    names: dict[str, str] = {}
    rest: list[Draft] = []
    for draft in tail.drafts:
        if draft.kind == "input" and draft.target in outputs:
            names[draft.name] = outputs[draft.target]
            continue
        names[draft.name] = f"loss.{draft.name}" if draft.name in taken else draft.name
        draft.name, draft.args, draft.kwargs = names[draft.name], renamed(draft.args, names), renamed(draft.kwargs, names)
        rest.append(draft)
    return Drafts(
        drafts=[*made.drafts, *rest],
        results={key: names[node] for key, node in tail.results.items()},
        constants={names[k]: v for k, v in tail.constants.items()},
        aliases=made.aliases,
        items=tuple(replace(item, node=names[item.node]) for item in tail.items),
    )


class _StandIn(nn.Module):
    """A stand-in for the whole model where only its loss is captured: it hands its inputs on."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, **outputs: Tensor) -> Any:
        """The single output, or the tuple of them."""
        values = tuple(outputs.values())
        return values[0] if self.num_outputs == 1 else values


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
            module = import_factory(block.factory)(*block.args, **block.kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            runs = [_run(block, module, [pair[i] for pair in values], grads) for i in range(2)]
    except CaptureError:
        raise
    except Exception:  # code that looks at data needs data
        try:
            module = import_factory(block.factory)(*block.args, **block.kwargs)
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
