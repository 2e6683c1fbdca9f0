"""A stage on one of several devices that share a replica (tensor parallelism): its code computes on shards.

`regions` says which operators do. The code of a stage gets four kinds of conversions at their borders, two and two
adjoint to each other (Megatron-LM, section 3):

    enter    whole -> whole     forward: nothing                     backward: the members' gradients are summed
    leave    part -> whole      forward: the members' parts are summed   backward: nothing
    take     whole -> share     forward: a slice                     backward: the members' slices are put together
    give     share -> whole     forward: the shares are put together     backward: a slice

Tensors that cross the stage's border are whole. Random operators on whole tensors draw the same numbers on every member, since all
are seeded alike; on shards each member draws numbers of its own, from a seed that follows from the common one and its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, fx

from gpp.capture.codec import is_random, operator_of
from gpp.capture.cut import AbstractShards, HeldPart
from gpp.capture.emit import Emitter
from gpp.graph.captured import Captured, Node, ref, renamed
from gpp.mechanisms.tensor_parallel.layout import Shard, rows, slices
from gpp.mechanisms.tensor_parallel.regions import Sharding
from gpp.mechanisms.tensor_parallel.rules import Applied


@final
@dataclass(frozen=True, kw_only=True)
class Shards(AbstractShards):
    """The part of a model's sharding that one device runs.

    Args:
        number: of the device among those of its replica, from 0.
        add_up: `sum`.
    """

    sharding: Sharding
    captured: Captured
    number: int
    add_up: Callable[[Tensor], None]

    @property
    def split(self) -> Mapping[str, HeldPart]:
        return self._parts

    @cached_property
    def _parts(self) -> dict[str, HeldPart]:
        nodes = (self.captured.node_of[name] for name in self.sharding.layouts)
        return {node.target: self._part(node) for node in nodes if node.kind == "param"}

    def _part(self, node: Node) -> HeldPart:
        shape, shard, degree = tuple(map(int, node.shape or ())), self.sharding.layouts[node.name], self.sharding.degree
        if node.name in self.sharding.tables:
            return HeldPart(shape, shard.dim, [rows(shape[shard.dim], degree, self.member)])
        return self.part_of(shape, shard)

    def part_of(self, shape: Sequence[int], shard: Shard) -> HeldPart:
        """The device's part of a whole tensor: 1 / degree of it along the shard's dimension."""
        return HeldPart(tuple(shape), shard.dim, tuple(slices(shape[shard.dim], shard, self.sharding.degree, self.member)))

    @property
    def member(self) -> int:
        return self.number

    def sum(self, tensor: Tensor) -> None:
        self.add_up(tensor)

    def code(self, emitter: Emitter, whole: frozenset[str]) -> tuple[Callable[[Node], None], Callable[[Sequence[str]], None]]:
        code = ShardedCode(emitter, self, whole)
        return code.call, code.outputs


class _Conversion(torch.autograd.Function):
    """One function of a tensor forwards, and its adjoint backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


class _Conversions:
    """The functions that a stage's code calls."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def enter(self, x: Tensor) -> Tensor:
        return _Conversion.apply(x, lambda whole: whole.view_as(whole), self._sum)

    def leave(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        whole: Tensor = _Conversion.apply(x, self._sum, lambda whole: whole)
        # Under autocast the product is of another type.
        return whole if bias is None else whole + bias.to(whole.dtype)

    def take(self, x: Tensor, dim: int, blocks: int) -> Tensor:
        shard = Shard(dim, blocks)
        return _Conversion.apply(x, lambda whole: self._cut(whole, shard).clone(), lambda share: self._join(share, shard))

    def give(self, x: Tensor, dim: int, blocks: int) -> Tensor:
        shard = Shard(dim, blocks)
        return _Conversion.apply(x, lambda share: self._join(share, shard), lambda whole: self._cut(whole, shard))

    def _sum(self, part: Tensor) -> Tensor:
        """The members' parts, added up in memory of its own: others may hold the gradient that autograd hands over."""
        total = part.clone(memory_format=torch.contiguous_format)
        self.shards.sum(total)
        return total

    def _cut(self, whole: Tensor, shard: Shard) -> Tensor:
        """The member's share of a whole tensor."""
        return self.shards.part_of(whole.shape, shard).cut(whole)

    def _join(self, share: Tensor, shard: Shard) -> Tensor:
        """The members' shares, put together."""
        degree = self.shards.sharding.degree
        shape = [extent * degree if dim == shard.dim else extent for dim, extent in enumerate(share.shape)]
        whole = self.shards.part_of(shape, shard).placed(share)
        self.shards.sum(whole)
        return whole

    def lookup(self, weight: Tensor, ids: Tensor, padding: int, lo: int) -> Tensor:
        """Rows [lo, lo + len(weight)) of a table, and zeros for ids of other rows."""
        here = (ids >= lo) & (ids < lo + weight.shape[0])
        index = torch.where(here, ids - lo, 0)
        padding = padding - lo if 0 <= padding - lo < weight.shape[0] else -1
        found = torch.ops.aten.embedding.default(weight, index, padding)
        return found.masked_fill(~here.unsqueeze(-1), 0.0)

    def drawing(self, target: Callable[..., Any]) -> Callable[..., Any]:
        """A random operator that draws numbers of this member's own, and leaves the generators of all members alike."""

        def draw(*args: Any, **kwargs: Any) -> Any:
            x = next(arg for arg in args if isinstance(arg, Tensor))
            seed = int(torch.randint(1 << 62, (), device="cpu")) + self.shards.member
            with torch.random.fork_rng([x.device] if x.is_cuda else []):
                torch.manual_seed(seed)
                return target(*args, **kwargs)

        return draw


class ShardedCode:
    """Adds a stage's calls to its code, with the conversions that they need.

    Args:
        whole: names whose values are whole in this stage although the model's sharding splits them: tensors that it receives.
    """

    def __init__(self, emitter: Emitter, shards: Shards, whole: frozenset[str]) -> None:
        self.emitter, self.shards, self.whole = emitter, shards, whole
        self._own, self._functions = _Conversions(shards), dict[str, Callable[..., Any]]()
        self._converted: dict[tuple[Any, ...], str] = {}

    def call(self, node: Node) -> None:
        """Add a call; one on whole tensors is added as it is."""
        applied = self.shards.sharding.applied.get(node.name)
        if applied is None:
            self.emitter.call(node)
            return
        self.emitter.begin(node)
        names = {name: self._operand(node, name, need) for name, need in applied.needs.items()}
        if node.target == "aten.embedding.default":
            self._lookup(node, names)
            return
        bias = _bias(node) if applied.summed else None
        changed = replace(node, args=renamed(self._local_args(node, applied), names), kwargs=renamed(node.kwargs, names))
        if bias is not None:
            changed = _without_bias(changed)
        target = operator_of(changed.target)
        draws = self.emitter.training and is_random(target, changed.args, changed.kwargs)
        self.emitter.call(changed, through=self._function(f"draw_{node.target}", self._own.drawing(target)) if draws else None)
        if applied.summed:
            self.emitter.values[node.name] = self._call("leave", self._own.leave, node.name, *([bias] if bias else []))

    def outputs(self, names: Sequence[str]) -> None:
        """Put together the tensors that leave the stage."""
        for name in names:
            shard = self.shards.sharding.layouts.get(name)
            if shard is not None and name not in self.whole:
                self.emitter.values[name] = self._call("give", self._own.give, name, shard.dim, shard.blocks)

    def _operand(self, node: Node, name: str, need: Shard | None) -> str:
        """The name under which an operand is as the node needs it."""
        split = name in self.shards.sharding.layouts and name not in self.whole
        if need is not None and not split:
            key = ("take", name, *need, node.no_grad)
            return self._once(key, "take", self._own.take, name, need.dim, need.blocks)
        enters = name in self.shards.sharding.entered(node) and not node.no_grad
        if enters and self.shards.captured.node_of[name].requires_grad:
            return self._once(("enter", name), "enter", self._own.enter, name)
        return name

    def _once(self, key: tuple[Any, ...], kind: str, function: Callable[..., Any], name: str, *more: int) -> str:
        if key not in self._converted:
            self._converted[key] = found = " ".join(map(str, key))
            self.emitter.values[found] = self._call(kind, function, name, *more)
        return self._converted[key]

    def _call(self, kind: str, function: Callable[..., Any], name: str, *more: Any) -> fx.Node:
        values = self.emitter.values
        args = tuple(values[arg] if isinstance(arg, str) else arg for arg in (name, *more))
        return self.emitter.graph.call_function(self._function(kind, function), args)

    def _function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of this stage's, under a name that generated code can have."""
        name = name.replace(".", "_")
        if name not in self._functions:

            def called(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            called.__name__ = called.__qualname__ = f"shards_{name}"
            self._functions[name] = called
        return self._functions[name]

    def _local_args(self, node: Node, applied: Applied) -> list[Any]:
        """Arguments with the sizes of a member's share."""
        kind, out, args = node.target.split(".")[1], applied.out, list(node.args)
        degree, rank = self.shards.sharding.degree, len(node.shape or ())
        if out is None:
            return args
        if kind in ("view", "reshape", "_unsafe_view", "expand"):
            args[1] = _divided(args[1], out.dim - (rank - len(args[1])), degree)
        elif kind == "unflatten":
            args[2] = _divided(args[2], out.dim - int(args[1]) % (rank - len(args[2]) + 1), degree)
        elif kind in ("split", "split_with_sizes"):
            (name, source), dim = next(iter(applied.needs.items())), args[2] if len(args) > 2 else node.kwargs.get("dim", 0)
            if source is not None and source.dim == dim % len(self.shards.captured.node_of[name].shape or ()):
                args[1] = [size // degree for size in args[1]] if isinstance(args[1], list) else args[1] // degree
        return args

    def _lookup(self, node: Node, names: dict[str, str]) -> None:
        weight, ids = ref(node.args[0]), ref(node.args[1])
        assert weight is not None and ids is not None
        extent = int(next(iter(self.shards.captured.node_of[weight].shape or ())))
        lo = rows(extent, self.shards.sharding.degree, self.shards.member)[0]
        padding = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
        # A negative padding index means none.
        padding = int(padding) if int(padding) >= 0 else -extent - 1
        self.emitter.values[node.name] = self._call("lookup", self._own.lookup, names[weight], names[ids], padding, lo)
        self.emitter.values[node.name] = self._call("leave", self._own.leave, node.name)


def _divided(sizes: list[Any], at: int, degree: int) -> list[Any]:
    if not 0 <= at < len(sizes) or sizes[at] == -1:
        return sizes
    return [size // degree if i == at else size for i, size in enumerate(sizes)]


def _bias(node: Node) -> str | None:
    """The bias that is added to a product once its sum is made."""
    if node.target == "aten.addmm.default":
        return ref(node.args[0])
    if node.target == "aten.linear.default":
        return ref(node.args[2] if len(node.args) > 2 else node.kwargs.get("bias"))
    return None


def _without_bias(node: Node) -> Node:
    if node.target == "aten.addmm.default":
        return replace(node, target="aten.mm.default", args=list(node.args[1:3]), kwargs={})
    return replace(node, args=list(node.args[:2]), kwargs={k: v for k, v in node.kwargs.items() if k != "bias"})
