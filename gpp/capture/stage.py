"""A stage's module, cut from a `Captured`.

`forward(batch, values)` runs generated code (a `torch.fx` graph), not an interpreter. Parameters and
buffers keep their full original names, so a stage's state dict is a part of the model's.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpp.capture.codec import dtype_of, empty_of
from gpp.capture.copies import NarrowCopies, casting
from gpp.capture.counts import Counts, Rows, needed_by
from gpp.capture.cut import AbstractShards, BoundaryTensor, Cut
from gpp.capture.emit import Root, Watcher
from gpp.errors import CaptureError, InvalidConfig
from gpp.graph.captured import LOSS, Captured, Node
from gpp.models.losses import named_tensors

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StageWatcher(Watcher, Protocol):
    """Is told of a stage's training pass."""

    def given(self, batch: int, arguments: Sequence[Tensor]) -> None:
        """Note that a pass begins, on so many samples and with the values of `StageModule.arguments`."""


class StageModule(nn.Module):
    """One stage of a captured model; made by `build_stage`.

    Args:
        inputs: names of the user inputs and targets that the stage needs.
        counts: what its losses are divided by; None where they are divided by nothing of the mini-batch.
        receives: tensors from other stages, named after the nodes that make them.
        sends: own tensors that other stages need.
        results: names of the stage's results (`loss` or `loss:NAME`, `metric:NAME`); metrics in evaluation only.
        makes: names of all that a pass returns, in order.
        has_random: whether the training pass draws random numbers.
        calls: nodes that the training pass calls, in order; a place is a position in it.
        arguments: nodes whose values the training pass is given: inputs, received tensors, leaves.
        cut: the nodes that it runs, and its boundary.
    """

    _root: Root

    def __init__(
        self, cut: Cut, root: Root, counts: Counts | None = None, *, training: bool, copies: NarrowCopies | None = None
    ) -> None:
        super().__init__()
        self.counts = counts
        object.__setattr__(self, "_root", root)  # shares its parameters; must not become a submodule
        self.cut = cut
        self.inputs, self.receives, self.sends, self.results = cut.inputs, cut.receives, cut.sends, cut.results
        self.has_random = training and cut.has_random
        self._run, self._reads, leaves, self.makes = cut.compile(root, training=training)
        self._watched: Callable[..., Any] | None = None
        passes = cut.captured.passes
        self._context: Callable[[], AbstractContextManager[object]] = (
            partial(casting, cut.device.type, passes) if passes else nullcontext
        )
        self.calls, self.arguments = cut.calls, cut.arguments
        self._leaves = root.holders(leaves)
        self._narrow = tuple((place, name) for place, name in enumerate(leaves) if name in cut.narrow)
        self._copies = copies or NarrowCopies(passes)
        self._keeps_mode = training and cut.has_no_grad
        # Each module of a hand-written block trains in the mode that it was made in.
        inside = [module for name in cut.blocks for module in root.get_submodule(name).modules()]
        self._modes = tuple((module, training and module.training) for module in inside)
        self.training = training
        # At last: a model may have a module that is called as an attribute of this one.
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set

    def call_through(self, calls: Mapping[str, Callable[..., Any]]) -> None:
        """Let training passes call nodes by other functions of the same arguments."""
        self.cut.calls_through = dict(calls)
        self._run = self.cut.compile(self._root, training=True)[0]

    def renew(self, written: Iterable[Tensor] | None = None) -> None:
        """Take note that weights have been written: copies of them are made anew. `written` as in `NarrowCopies.forget`."""
        self._copies.forget(written)

    def watch(self, draws: frozenset[str]) -> None:
        """Let training passes take a watcher.

        Args:
            draws: nodes before which it is told that random numbers are drawn.
        """
        self._watched = self.cut.compile(self._root, training=True, draws=draws)[0]

    def part(
        self, nodes: Iterable[str], draws: frozenset[str]
    ) -> tuple[Callable[[int, Watcher, Iterable[Tensor]], None], tuple[str, ...]]:
        """Code that calls some nodes of the training pass again.

        Args:
            nodes: out of `calls`.

        Returns:
            A function of the batch size, a watcher and the values of other nodes; and the names of those nodes.
        """
        run, reads = self.cut.part(self._root, nodes, draws)

        def again(batch: int, watcher: Watcher, values: Iterable[Tensor]) -> None:
            with self._context():
                run(self._root, batch, watcher, *values)

        return again, reads

    def forward(self, batch: int, values: dict[str, Tensor], watcher: StageWatcher | None = None) -> dict[str, Tensor]:
        """Run the stage.

        Args:
            batch: samples in this micro-batch.
            values: by name, the tensors that `inputs` and `receives` list; others are ignored.
            watcher: is told of the calls of a training pass, after `watch`.

        Returns:
            Tensors by name: `sends`, and the losses (training) or all results (evaluation).
        """
        for module, mode in self._modes:
            module.training = mode
        if self.counts and self.counts.lacks(values):
            # Nobody has said of which mini-batch these samples are: they are one.
            values = {**values, **self.counts.columns(values)(0, batch)}
        leaves = [holder[name] for holder, name in self._leaves]
        for place, name in self._narrow:
            leaves[place] = self._copies.of(name, leaves[place])
        arguments = *[values[name] for name in self._reads], *leaves
        run, head = self._run, (self._root, batch)
        if watcher is not None:
            assert self._watched is not None, "`watch` comes first"
            watcher.given(batch, arguments)
            run, head = self._watched, (self._root, batch, watcher)
        if self._keeps_mode or self._context is not nullcontext:
            with torch.set_grad_enabled(torch.is_grad_enabled()), self._context():
                made = run(*head, *arguments)
        else:
            made = run(*head, *arguments)
        return dict(zip(self.makes, made, strict=True))

    def eval_module(self) -> StageModule:
        """The stage in evaluation, with the same parameters: dropout off, running statistics used, metrics made."""
        return StageModule(self.cut, self._root, self.counts, training=False, copies=self._copies)

    def counting(self, rows: Rows, labels: Rows, size: int) -> Rows:
        """The rows of a pass, and what the losses of mini-batches are divided by.

        Args:
            rows, labels: function (lo, hi) -> those samples' rows, of all `inputs`, and of those that `counts` reads.
            size: samples of a mini-batch.
        """
        return rows if self.counts is None else self.counts.beside(rows, labels, size)

    def compile_with(self, backend: str) -> None:
        """Compile the stage's training pass with torch.compile."""
        self._run = torch.compile(self._run, backend=backend)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace own parameters and buffers by the given ones of the same full names."""
        root = self._root
        every = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
        own = {name for name, _ in every}
        root.adopt({name: tensor for name, tensor in tensors.items() if name in own})
        if self.counts:
            self.counts.module.adopt(tensors)

    def spec(self, name: str) -> BoundaryTensor:
        """The form of tensor `name` (an input, received or sent).

        Raises:
            CaptureError: the tensor's samples cannot be told apart, so it cannot cross a boundary.
        """
        node = self.cut.node_of[name]
        if node.batch_dim is None or node.shape is None or node.dtype is None:
            raise CaptureError(f"{name} has no batch dimension, so it cannot cross a boundary")
        rest = tuple(extent for i, extent in enumerate(node.shape) if i != node.batch_dim)
        own, grad = dtype_of(node.dtype), node.requires_grad
        return BoundaryTensor(shape=rest, batch_dim=node.batch_dim, dtype=self.cut.dtypes.get(own, own), differentiable=grad)

    def entering(self) -> dict[str, Node]:
        """The tensors that `inputs` and `receives` list, by name, with the node of each."""
        captured = self.cut.captured
        return {name: captured.rows.get(name) or captured.node_of[name] for name in (*self.inputs, *self.receives)}

    def wants(self) -> dict[str, Tensor]:
        """The parameters, buffers and constants that need a value, by full name; those that losses are divided by, too."""
        constants = self.cut.captured.constants
        own = {name: tensor for name, tensor in self._root.owned() if constants.get(name) is None}
        return own | (self.counts.module.wants() if self.counts else {})

    def take(self, name: str, value: Tensor) -> None:
        """Copy a value into every tensor of that full name (canonical name of tied weights).

        Raises:
            CaptureError: it has another shape.
        """
        for part in (self, *([self.counts.module] if self.counts else [])):
            tensor = dict(part._root.owned()).get(name)
            if tensor is None:
                continue
            if value.shape != tensor.shape:
                raise CaptureError(f"{name} has shape {tuple(value.shape)} in the state, the model's has {tuple(tensor.shape)}")
            with torch.no_grad():
                tensor.copy_(value)

    def load(self, mapping: Mapping[str, Tensor]) -> None:
        """Copy parameters, buffers and constants from a mapping by full name (canonical name of tied weights).

        Raises:
            CaptureError: a name is missing or has another shape.
        """
        wants, every = self.wants(), [name for name, _ in self._root.owned()]
        for name in dict.fromkeys((*every, *wants)):
            if name in mapping:
                self.take(name, mapping[name])
            elif name in wants:
                raise CaptureError(f"the state has no tensor {name}. Fix: save it with initial_state(model, captured)")


def build_stage(
    captured: Captured,
    nodes: Iterable[str],
    *,
    device: torch.device | str,
    dtype_of_floats: torch.dtype | None = None,
    blocks: Mapping[str, Callable[[], nn.Module]] | None = None,
    shards: AbstractShards | None = None,
) -> StageModule:
    """The module of the stage that holds `nodes`: the node names of all of its operators.

    Parameters and buffers are empty; fill them with `StageModule.load`.

    Args:
        device: where parameters, buffers and tensors made by the stage live.
        dtype_of_floats: the type that replaces every floating-point type (a mix would be promoted to the widest).
        blocks: makers of hand-written blocks by block name; default: each block's factory is imported.
        shards: the device's part of a replica of several devices; its parameters are then shares. None for a whole stage.

    Raises:
        CaptureError: a node is unknown, or an operator is not registered in this process.
    """
    device = torch.device(device)
    dtypes = {} if dtype_of_floats is None else dict.fromkeys(_FLOATS, dtype_of_floats)
    cut = Cut(captured, nodes, device, dtypes, shards)
    root = Root()
    for name in cut.blocks:
        root.add_block(captured.node_of[name], (blocks or {}).get(name), device, dtypes)
    for node in cut.leaves:
        if shards and node.kind == "param" and (part := shards.split.get(node.target)):
            held = sum(hi - lo for lo, hi in part.ranges)
            node = replace(node, shape=(*part.shape[: part.dim], held, *part.shape[part.dim + 1 :]))
        root.add(node, device, dtypes)
        data = captured.constants.get(node.target) if node.kind == "constant" else None
        if data is not None:
            _fill(root.get(node.target), node, data)
    return StageModule(cut, root, _counts(captured, cut, device, dtype_of_floats), training=True)


def _counts(captured: Captured, cut: Cut, device: torch.device, dtype_of_floats: torch.dtype | None) -> Counts | None:
    """The numbers by which a stage's losses are divided: a small module of its own makes them from rows."""
    if not cut.items:
        return None
    needed = needed_by(captured.node_of, [item.node for item in cut.items])
    nodes = tuple(node for node in captured.nodes if node.name in needed)
    results = {f"metric:{item.name}": item.node for item in cut.items}
    own = replace(captured, nodes=nodes, results=results, items=(), passes=None)
    called = [node.name for node in nodes if node.kind == "call"]
    module = build_stage(own, called, device=device, dtype_of_floats=dtype_of_floats).eval_module()
    return Counts(module, cut.items, captured.batch, dtype_of_floats)


def tie(modules: Iterable[StageModule]) -> None:
    """Make stages of one process share the parameters that they both have: one tensor, one gradient."""
    known: dict[str, nn.Parameter] = {}
    for module in modules:
        own = dict(module.named_parameters(remove_duplicate=False))
        module.adopt({name: known[name] for name in own if name in known})
        known = {**own, **known}


def leaves_of(captured: Captured, nodes: Iterable[str]) -> frozenset[str]:
    """Full names of the parameters, buffers and constants that the stage of `nodes` holds; nothing is built."""
    return frozenset(node.target for node in Cut(captured, nodes, torch.device("meta"), {}).leaves)


def _fill(tensor: Tensor, node: Node, data: str) -> None:
    if not data:  # a tensor without elements
        return
    raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    tensor.copy_(raw.view(dtype_of(node.dtype or "float32")).reshape(tensor.shape))


def initial_state(model: nn.Module, captured: Captured, loss: nn.Module | None = None) -> dict[str, Tensor]:
    """All parameters, buffers (non-persistent ones too) and constants under the names that stages load them by.

    Args:
        loss: the module of the loss, if it is one.

    Raises:
        CaptureError: neither the model nor the capture holds the value of a constant.
        InvalidConfig: the captured loss has tensors of its own, and no `loss` is given that holds them.
    """
    state = {captured.aliases.get(name, name): tensor.detach() for name, tensor in named_tensors(model, loss)}
    held = [node.target for node in captured.nodes if node.kind in ("param", "buffer")]
    if lacking := [name for name in held if name.startswith(f"{LOSS}.") and name not in state]:
        rule = f"has tensors of its own, as {lacking[0]}, which only the module of the loss holds"
        raise InvalidConfig("loss", None, rule, "give the module that was captured, as loss=criterion")
    for name, data in captured.constants.items():
        node = captured.node_of[name]
        held = reduce(lambda value, part: getattr(value, part, None), node.target.split("."), model)
        if data is not None:
            state[node.target] = empty_of(node)
            _fill(state[node.target], node, data)
        elif isinstance(held, Tensor):
            state[node.target] = held.detach()
        else:
            raise CaptureError(f"the value of the constant {name} is not known. Fix: register it as a buffer of the model")
    return state
