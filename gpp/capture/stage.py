"""A stage's module, cut from a `Captured`.

`forward(batch, values)` runs generated code (a `torch.fx` graph), not an interpreter. Parameters and
buffers keep their full original names, so a stage's state dict is a part of the model's.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpp.capture.codec import dtype_of, is_random, operator_of, writes
from gpp.capture.emit import Emitter, Root, Watcher
from gpp.capture.halves import Halves, halves
from gpp.capture.late import Late
from gpp.capture.sharded import ShardedCode, Shards
from gpp.errors import CaptureError
from gpp.graph.captured import Captured, Node, is_loss, node_references

LEAVES = ("param", "buffer", "constant")
"""Kinds of nodes whose tensors a stage holds."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The form of a received or sent tensor.

    Args:
        shape: sizes without the batch dimension.
        batch_dim: position of the batch dimension.
        differentiable: whether a gradient of the loss may flow back through it; in a receiving stage that does not use
            it differentiably, its gradient is None.
    """

    shape: tuple[int, ...]
    batch_dim: int
    dtype: torch.dtype
    differentiable: bool


class StageWatcher(Watcher, Protocol):
    """Is told of a stage's training pass."""

    def given(self, batch: int, arguments: Sequence[Tensor]) -> None:
        """The pass begins, on so many samples and the values of `StageModule.arguments`."""


class StageModule(nn.Module):
    """One stage of a captured model; made by `build_stage`.

    Args:
        inputs: names of the user inputs and targets that the stage needs.
        receives: tensors from other stages, named after the nodes that make them.
        sends: own tensors that other stages need.
        results: names of the stage's results (`loss` or `loss:NAME`, `metric:NAME`); metrics in evaluation only.
        makes: names of all that a pass returns, in order.
        has_random: whether the training pass draws random numbers.
        calls: nodes that the training pass calls, in order; a place is a position in it.
        arguments: nodes whose values the training pass is given: inputs, received tensors, leaves.
        late: where a backward leaves the gradients of the weights; None where it makes them.
    """

    inputs: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    results: tuple[str, ...]
    makes: tuple[str, ...]
    has_random: bool
    calls: tuple[str, ...]
    arguments: tuple[str, ...]
    _root: Root

    def __init__(self, cut: _Cut, root: Root, *, training: bool) -> None:
        super().__init__()
        self._share(root)
        object.__setattr__(self, "_root", root)  # shares its parameters; must not become a submodule
        self._cut = cut
        self.inputs, self.receives, self.sends, self.results = cut.inputs, cut.receives, cut.sends, cut.results
        self.has_random = training and cut.has_random
        self._run, self._reads, leaves, self.makes = cut.compile(root, training=training)
        self._watched: Callable[..., Any] | None = None
        self.late: Late | None = None
        self.calls, self.arguments = cut.calls, cut.arguments
        self._leaves = root.holders(leaves)
        self._keeps_mode = training and cut.has_no_grad
        self._blocks = tuple(root.block(name) for name in cut.blocks)
        self.training = training

    def _share(self, root: Root) -> None:
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set

    def split(self, *, whole: frozenset[str] = frozenset(), formulas: bool = False) -> Halves:
        """Let the backward of training passes leave the gradients of the weights in `late`; arguments as `halves` has them."""
        self._cut.late = self.late = Late(self._cut.device)
        self._cut.halves = halves(self._cut.captured, self.calls, self._cut.sources(), whole=whole, formulas=formulas)
        self._run = self._cut.compile(self._root, training=True)[0]
        return self._cut.halves

    def watch(self, draws: frozenset[str]) -> None:
        """Let training passes take a watcher.

        Args:
            draws: nodes before which it is told that random numbers are drawn.
        """
        self._watched = self._cut.compile(self._root, training=True, draws=draws)[0]

    def part(
        self, nodes: Iterable[str], draws: frozenset[str]
    ) -> tuple[Callable[[int, Watcher, Iterable[Tensor]], None], tuple[str, ...]]:
        """Code that calls some nodes of the training pass again.

        Args:
            nodes: out of `calls`.

        Returns:
            A function of the batch size, a watcher and the values of other nodes; and the names of those nodes.
        """
        run, reads = self._cut.part(self._root, nodes, draws)

        def again(batch: int, watcher: Watcher, values: Iterable[Tensor]) -> None:
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
        for block in self._blocks:
            block.train(self.training)
        arguments = *[values[name] for name in self._reads], *[holder[name] for holder, name in self._leaves]
        run, head = self._run, (self._root, batch)
        if watcher is not None:
            assert self._watched is not None, "`watch` comes first"
            watcher.given(batch, arguments)
            run, head = self._watched, (self._root, batch, watcher)
        if self._keeps_mode:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                made = run(*head, *arguments)
        else:
            made = run(*head, *arguments)
        return dict(zip(self.makes, made, strict=True))

    def eval_module(self) -> StageModule:
        """The stage in evaluation, with the same parameters: dropout off, running statistics used, metrics made."""
        return StageModule(self._cut, self._root, training=False)

    def compile_with(self, backend: str) -> None:
        """Compile the stage's training pass with torch.compile."""
        self._run = torch.compile(self._run, backend=backend)

    def adopt(self, params: Mapping[str, nn.Parameter]) -> None:
        """Replace own parameters by the given ones of the same full names."""
        self._root.adopt(params)

    def spec(self, name: str) -> TensorSpec:
        """The form of tensor `name` (an input, received or sent).

        Raises:
            CaptureError: the tensor's samples cannot be told apart, so it cannot cross a boundary.
        """
        return self._cut.spec(name)

    def load(self, mapping: Mapping[str, Tensor]) -> None:
        """Copy parameters, buffers and constants from a mapping by full name (canonical name of tied weights).

        Raises:
            CaptureError: a name is missing or has another shape.
        """
        with torch.no_grad():
            for name, tensor in self._root.owned():
                if name in mapping:
                    value = mapping[name]
                elif self._cut.captured.constants.get(name) is not None:
                    continue
                else:
                    raise CaptureError(f"the state has no tensor {name}. Fix: save it with initial_state(model, captured)")
                if value.shape != tensor.shape:
                    raise CaptureError(f"{name} has shape {tuple(value.shape)} in the state, the model's has {tuple(tensor.shape)}")
                tensor.copy_(value)


class _Cut:
    """The nodes that a stage runs, and the tensors that cross its boundary."""

    def __init__(
        self,
        captured: Captured,
        nodes: Iterable[str],
        device: torch.device,
        dtypes: dict[torch.dtype, torch.dtype],
        shards: Shards | None = None,
    ) -> None:
        self.captured, self.device, self.dtypes, self.shards = captured, device, dtypes, shards
        self.halves: Halves | None = None
        self.late: Late | None = None
        self.node_of = captured.node_of
        self.order = {node.name: i for i, node in enumerate(captured.nodes)}
        self.own = set(nodes)
        if unknown := sorted(self.own - set(self.order)):
            raise CaptureError(f"the captured model has no nodes {', '.join(unknown[:5])}")
        self.results = tuple(name for name, node in captured.results.items() if node in self.own)
        roots = self._boundary()
        self.train_closure, self.eval_closure = self._closure(roots, training=True), self._closure(roots, training=False)
        both = sorted(self.train_closure | self.eval_closure, key=self.order.__getitem__)
        self.inputs = tuple(self.node_of[n].target for n in both if self.node_of[n].kind == "input")
        self.receives = tuple(n for n in both if self._foreign(self.node_of[n]))
        self.leaves = [self.node_of[n] for n in both if self.node_of[n].kind in LEAVES]
        self.blocks = tuple(n for n in both if self.node_of[n].kind == "block" and n in self.own)
        touched = [self.node_of[name] for name in self.train_closure]
        running = [node for node in touched if node.kind == "call" and not self._foreign(node)]
        self.has_no_grad = any(node.no_grad for node in running)
        trained = sorted(self.train_closure, key=self.order.__getitem__)
        self.calls = tuple(n for n in trained if self.node_of[n].kind in ("call", "block") and not self._foreign(self.node_of[n]))
        self.place = {name: place for place, name in enumerate(self.calls)}
        outside = [n for n in trained if self.node_of[n].kind == "input" or self._foreign(self.node_of[n])]
        self.arguments = (*outside, *(n for n in trained if self.node_of[n].kind in LEAVES))
        self.has_random = bool(self.blocks) or any(is_random(operator_of(n.target), n.args, n.kwargs) for n in running)

    def _foreign(self, node: Node) -> bool:
        return node.kind in ("call", "block") and not node.free and node.name not in self.own

    def _boundary(self) -> list[str]:
        """Fill `sends`; returns the nodes that every pass must compute for other stages (results excluded)."""
        sends, roots = set(), set()
        for node in self.captured.nodes:
            if not self._foreign(node):
                continue
            for name in node_references(node):
                if name in self.own and not self.node_of[name].free:
                    sends.add(name)
            # the reader sees the values that these nodes have written into a sent tensor
            roots.update(name for name in node.after if name in self.own and not self.node_of[name].free)
        self.sends = tuple(sorted(sends, key=self.order.__getitem__))
        return sorted(sends | roots, key=self.order.__getitem__)

    def dropped(self, node: Node) -> bool:
        """Whether evaluation leaves a node out: it only updates a buffer."""
        return bool(node.mutates) and node.kind == "call" and writes(operator_of(node.target))

    def _closure(self, roots: list[str], *, training: bool) -> set[str]:
        """Nodes that a pass touches, leaves and received tensors included."""
        todo = list(roots)
        for name, node in self.captured.results.items():
            if node in self.own and (is_loss(name) or not training):
                todo.append(node)
        own_writers = [
            n
            for n in self.own
            if self.node_of[n].kind == "call" and (self.node_of[n].mutates or writes(operator_of(self.node_of[n].target)))
        ]
        todo += own_writers if training else [n for n in own_writers if not self.dropped(self.node_of[n])]
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.node_of[name]
            if self._foreign(node):
                continue
            todo += node_references(node)
            todo += [
                n for n in node.after if (not self._foreign(self.node_of[n])) and (training or not self.dropped(self.node_of[n]))
            ]
        return seen

    def compile(
        self, root: Root, *, training: bool, draws: frozenset[str] | None = None
    ) -> tuple[Callable[..., Any], tuple[str, ...], list[str], tuple[str, ...]]:
        """The generated function; names of its arguments from outside, those of the root, and results; `draws` as in `watch`."""
        closure = self.train_closure if training else self.eval_closure
        emitter = self._emitter(root, training=training, watched=draws is not None)
        reads, placed = [], set[str]()
        ordered = [self.node_of[name] for name in sorted(closure, key=self.order.__getitem__)]
        for node in ordered:
            if node.kind == "input" or self._foreign(node):
                emitter.placeholder(node.name)
                placed.add(node.name)
                reads.append(node.target if node.kind == "input" else node.name)
        leaves = [node for node in ordered if node.kind in LEAVES]
        for node in leaves:
            emitter.placeholder(node.name)
        sharded = ShardedCode(emitter, self.shards, frozenset(placed)) if self.shards else None
        for node in ordered:
            if node.kind in ("call", "block") and not self._foreign(node):
                if not training and self.dropped(node):
                    emitter.skip(node)
                elif draws is None:
                    (sharded or emitter).call(node)
                else:
                    self._tell(emitter, (sharded or emitter).call, node.name, self.place[node.name] + 1, draws)
        if sharded:
            sharded.outputs(list(self.sends))
        results = [name for name in self.results if is_loss(name) or not training]
        run = emitter.finish([*self.sends, *(self.captured.results[name] for name in results)])
        return run, tuple(reads), [node.target for node in leaves], (*self.sends, *results)

    def sources(self) -> list[str]:
        """Nodes whose values a training pass returns."""
        return [*self.sends, *(self.captured.results[name] for name in self.results if is_loss(name))]

    def _emitter(self, root: Root, *, training: bool, watched: bool) -> Emitter:
        batch = self.captured.batch
        through = self._through if training and self.halves else None
        return Emitter(
            root, device=self.device, dtypes=self.dtypes, training=training, batch=batch, watched=watched, through=through
        )

    def _through(self, node: Node) -> Callable[..., Any] | None:
        """What calls an operator in a split backward's forward, if it is another."""
        late = self.halves.split.get(node.name) if self.halves else None
        return self.late.of(node.target, late, operator_of(node.target)) if late and self.late else None

    def _tell(self, emitter: Emitter, call: Callable[[Node], None], name: str, following: int, draws: frozenset[str]) -> None:
        """Call a node, and tell the watcher of it."""
        if name in draws:
            emitter.tell_draws(self.place[name])
        call(self.node_of[name])
        emitter.tell_made(self.place[name], following, name)

    def part(self, root: Root, nodes: Iterable[str], draws: frozenset[str]) -> tuple[Callable[..., Any], tuple[str, ...]]:
        """See `StageModule.part`."""
        own = sorted(nodes, key=self.order.__getitem__)
        emitter = self._emitter(root, training=True, watched=True)
        reads = tuple(dict.fromkeys(n for name in own for n in node_references(self.node_of[name]) if n not in own))
        for name in reads:
            emitter.placeholder(name)
        for name, following in zip(own, (*own[1:], own[-1]), strict=True):
            self._tell(emitter, emitter.call, name, self.place[following], draws)
        return emitter.finish([]), reads

    def spec(self, name: str) -> TensorSpec:
        """See `StageModule.spec`."""
        node = self.node_of[name]
        if node.batch_dim is None or node.shape is None or node.dtype is None:
            raise CaptureError(f"{name} has no batch dimension, so it cannot cross a boundary")
        rest = tuple(extent for i, extent in enumerate(node.shape) if i != node.batch_dim)
        dtype = dtype_of(node.dtype)
        return TensorSpec(
            shape=rest, batch_dim=node.batch_dim, dtype=self.dtypes.get(dtype, dtype), differentiable=node.requires_grad
        )


def build_stage(
    captured: Captured,
    nodes: Iterable[str],
    *,
    device: torch.device | str,
    dtype_of_floats: torch.dtype | None = None,
    blocks: Mapping[str, Callable[[], nn.Module]] | None = None,
    shards: Shards | None = None,
) -> StageModule:
    """The module of the stage that holds `nodes`: the node names of all of its operators.

    Parameters and buffers are empty; fill them with `StageModule.load`.

    Args:
        device: where parameters, buffers and tensors made by the stage live.
        dtype_of_floats: the type that replaces every floating-point type (a mix would be promoted to the widest).
        blocks: makers of hand-written blocks by block name; default: each block's factory is imported.
        shards: the device's part of a tensor-parallel replica; its parameters are then shares (`Shards.share`). None for a whole
            stage.

    Raises:
        CaptureError: a node is unknown, or an operator is not registered in this process.
    """
    device = torch.device(device)
    dtypes = {} if dtype_of_floats is None else dict.fromkeys(_FLOATS, dtype_of_floats)
    cut = _Cut(captured, nodes, device, dtypes, shards)
    root = Root()
    for name in cut.blocks:
        root.add_block(captured.node_of[name], (blocks or {}).get(name), device, dtypes)
    for node in cut.leaves:
        root.add(replace(node, shape=shards.shape(node)) if shards else node, device, dtypes)
        data = captured.constants.get(node.target) if node.kind == "constant" else None
        if data is not None:
            _fill(root.get(node.target), node, data)
    return StageModule(cut, root, training=True)


def tie(modules: Iterable[StageModule]) -> None:
    """Make stages of one process share the parameters that they both have: one tensor, one gradient."""
    known: dict[str, nn.Parameter] = {}
    for module in modules:
        own = dict(module.named_parameters(remove_duplicate=False))
        module.adopt({name: known[name] for name in own if name in known})
        known = {**own, **known}


def leaves_of(captured: Captured, nodes: Iterable[str]) -> frozenset[str]:
    """Full names of the parameters, buffers and constants that the stage of `nodes` holds; nothing is built."""
    return frozenset(node.target for node in _Cut(captured, nodes, torch.device("meta"), {}).leaves)


def _fill(tensor: Tensor, node: Node, data: str) -> None:
    if not data:  # a tensor without elements
        return
    raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    tensor.copy_(raw.view(dtype_of(node.dtype or "float32")).reshape(tensor.shape))


def initial_state(model: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """All parameters, buffers (non-persistent ones too) and constants under the names that stages load them by.

    Raises:
        CaptureError: neither the model nor the capture holds the value of a constant.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    state = {captured.aliases.get(name, name): tensor.detach() for name, tensor in tensors.items()}
    for name, data in captured.constants.items():
        node = captured.node_of[name]
        held = _attribute(model, node.target)
        if data is not None:
            state[node.target] = torch.empty([int(extent) for extent in node.shape or ()], dtype=dtype_of(node.dtype or "float32"))
            _fill(state[node.target], node, data)
        elif isinstance(held, Tensor):
            state[node.target] = held.detach()
        else:
            raise CaptureError(f"the value of the constant {name} is not known. Fix: register it as a buffer of the model")
    return state


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
