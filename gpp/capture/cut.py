"""The nodes that a stage runs, the tensors that cross its boundary, and the code of its passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpp.capture.codec import is_random, operator_of, writes
from gpp.capture.counts import needed_by
from gpp.capture.emit import Emitter, Root
from gpp.errors import CaptureError
from gpp.graph.captured import LEAVES, Captured, Node, closure, is_loss, is_row, node_references


class HeldPart(NamedTuple):
    """The part of a tensor of sizes `shape` that a device holds: these ranges [lo, hi) of dimension `dim`, one behind the other."""

    shape: tuple[int, ...]
    dim: int
    ranges: Sequence[tuple[int, int]]

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor."""
        parts = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def placed(self, part: Tensor) -> Tensor:
        """A whole tensor, of zeros but for the part."""
        whole, at = part.new_zeros(self.shape), 0
        for lo, hi in self.ranges:
            whole.narrow(self.dim, lo, hi - lo).copy_(part.narrow(self.dim, at, hi - lo))
            at += hi - lo
        return whole


class AbstractShards(ABC):
    """A stage on one of the devices that share a replica: what the device holds of the parameters, by full name, and its code."""

    @property
    @abstractmethod
    def member(self) -> int:
        """Number of the device among those of the replica, from 0."""

    @property
    @abstractmethod
    def split(self) -> Mapping[str, HeldPart]:
        """The parameters of which the device holds a part; it holds all others whole."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> None:
        """Add up a contiguous tensor over the devices of the replica, in place; all of them call it, in one order."""

    @abstractmethod
    def code(self, emitter: Emitter, whole: frozenset[str]) -> tuple[Callable[[Node], None], Callable[[Sequence[str]], None]]:
        """Two functions for the stage's code: one adds a call, the other makes the tensors of these names whole, which leave it.

        Args:
            whole: names of tensors that the stage receives, which are whole.
        """

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The whole of a parameter, or of a tensor that lies like it. All devices of the replica call it."""
        if name not in self.split:
            return share
        out = self.split[name].placed(share)
        self.sum(out)
        return out

    def share(self, name: str, whole: Tensor) -> Tensor:
        """The device's share of a parameter, or of a tensor that lies like it."""
        return self.split[name].cut(whole) if name in self.split else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
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


class Cut:
    """The nodes that a stage runs, and the tensors that cross its boundary."""

    def __init__(
        self,
        captured: Captured,
        nodes: Iterable[str],
        device: torch.device,
        dtypes: dict[torch.dtype, torch.dtype],
        shards: AbstractShards | None = None,
    ) -> None:
        self.captured, self.device, self.dtypes, self.shards = captured, device, dtypes, shards
        self.calls_through: dict[str, Callable[..., Any]] = {}
        self.node_of = captured.node_of
        self.order = {node.name: i for i, node in enumerate(captured.nodes)}
        self.own = set(nodes)
        if unknown := sorted(self.own - set(self.order)):
            raise CaptureError(f"the captured model has no nodes {', '.join(unknown[:5])}")
        self.results = tuple(name for name, node in captured.results.items() if node in self.own)
        roots = self._boundary()
        self.train_closure, self.eval_closure = self._closure(roots, training=True), self._closure(roots, training=False)
        both = sorted(self.train_closure | self.eval_closure, key=self.order.__getitem__)
        given = {self.node_of[n].target for n in both if self.node_of[n].kind == "input"}
        self.items = tuple(item for item in captured.items if item.name in given)
        counted = needed_by(self.node_of, [item.node for item in self.items])
        rows = sorted({*both, *counted}, key=self.order.__getitem__)
        self.inputs = tuple(self.node_of[n].target for n in rows if is_row(self.node_of[n]))
        self.receives = tuple(n for n in both if self._foreign(self.node_of[n]))
        self.leaves = [self.node_of[n] for n in both if self.node_of[n].kind in LEAVES]
        wide = {need for n in both if not self._foreign(self.node_of[n]) for need in self._wide(self.node_of[n])}
        self.narrow = frozenset(n.target for n in self.leaves if n.kind == "param" and captured.passes and n.name not in wide)
        """Parameters of which passes are given copies in their own type: nobody here reads them as they are."""
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

    @staticmethod
    def _wide(node: Node) -> set[str]:
        """Nodes whose values a node reads as they are."""
        return set(node_references(node)) - set(node.narrow)

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

        def needed(name: str) -> list[str]:
            node = self.node_of[name]
            if self._foreign(node):
                return []
            writers = [self.node_of[n] for n in node.after]
            own = [n.name for n in writers if not self._foreign(n) and (training or not self.dropped(n))]
            return [*node_references(node), *own]

        return closure(todo, needed)

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
        call, whole = self.shards.code(emitter, frozenset(placed)) if self.shards else (emitter.call, None)
        for node in ordered:
            if node.kind in ("call", "block") and not self._foreign(node):
                if not training and self.dropped(node):
                    emitter.skip(node)
                elif draws is None:
                    call(node)
                else:
                    self._tell(emitter, call, node.name, self.place[node.name] + 1, draws)
        if whole:
            whole(self.sends)
        results = [name for name in self.results if is_loss(name) or not training]
        run = emitter.finish([*self.sends, *(self.captured.results[name] for name in results)])
        return run, tuple(reads), [node.target for node in leaves], (*self.sends, *results)

    @property
    def outputs(self) -> list[str]:
        """Own nodes whose values leave a training pass: for other stages, and the losses."""
        return [*self.sends, *(self.captured.results[name] for name in self.results if is_loss(name))]

    def _emitter(self, root: Root, *, training: bool, watched: bool) -> Emitter:
        batch = self.captured.batch
        through = self.calls_through if training else {}
        return Emitter(
            root, device=self.device, dtypes=self.dtypes, training=training, batch=batch, watched=watched, through=through
        )

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
