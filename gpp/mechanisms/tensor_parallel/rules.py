"""The closed table of operators that can run on shards: what each needs of its operands, given how one of its tensors lies.

A rule looks at an operator's result and operands. If one of them is known to be split, it says how all the others lie: split alike,
or whole (None). `summed` says that each member makes a part of the whole result, which the members add up. A rule returns None
where the operator cannot run so. An operator without a rule runs on whole tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gpp.graph.captured import Node, ref, references
from gpp.mechanisms.tensor_parallel.layout import Nodes, Shape, Shard, reshaped

Known = Callable[[str], Shard | None]


class Applied(NamedTuple):
    """How one operator runs on shards.

    Args:
        out: how its result lies; None if whole.
        needs: operand -> how it must lie; None for whole.
        summed: whether the members' results are added up, and the sum is the whole result.
    """

    out: Shard | None
    needs: dict[str, Shard | None]
    summed: bool = False


Rule = Callable[[Node, Known, Nodes], "Applied | None"]


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def operands(node: Node) -> list[str]:
    """Tensors that a node reads, each once."""
    return list(dict.fromkeys(references([*node.args, *node.kwargs.values()])))


def _known_out(node: Node, known: Known, lifted: Iterator[Shard | None]) -> Shard | None:
    """How the result lies: as is known, or as follows from an operand."""
    return known(node.name) or next((shard for shard in lifted if shard is not None), None)


def _aligned(shard: Shard, shape: Shape, out: Shape) -> Shard | None:
    """The split of an operand that is broadcast to a result with this split; None if it is broadcast along it."""
    dim = shard.dim - (len(out) - len(shape))
    return Shard(dim, shard.blocks) if dim >= 0 and shape[dim] == out[shard.dim] else None


def elementwise(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Operators whose operands are broadcast to the result's shape."""
    out_shape, names = nodes.shape(node.name), operands(node)

    def lifted() -> Iterator[Shard | None]:
        for name in names:
            shard, shape = known(name), nodes.shape(name)
            if shard is not None and shape[shard.dim] != 1:
                yield Shard(shard.dim + len(out_shape) - len(shape), shard.blocks)

    out = _known_out(node, known, lifted())
    return None if out is None else Applied(out, {name: _aligned(out, nodes.shape(name), out_shape) for name in names})


def view(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Operators that keep the order of the elements and change the shape."""
    name = ref(node.args[0])
    if name is None:
        return None
    own, before = nodes.shape(node.name), nodes.shape(name)
    out, given = known(node.name), known(name)
    if out is None and given is not None:
        out = reshaped(given, before, own, nodes.degree)
    source = None if out is None else reshaped(out, own, before, nodes.degree)
    return None if out is None or source is None else Applied(out, {name: source})


def _moved(order: Callable[[Node, int], list[int] | None]) -> Rule:
    """A rule for a permutation: `order` gives the operand's dimension for each of the result's."""

    def rule(node: Node, known: Known, nodes: Nodes) -> Applied | None:
        name = ref(node.args[0])
        dims = None if name is None else order(node, len(nodes.shape(name)))
        if name is None or dims is None:
            return None
        given, out = known(name), known(node.name)
        if out is None and given is not None:
            out = Shard(dims.index(given.dim), given.blocks)
        return None if out is None else Applied(out, {name: Shard(dims[out.dim], out.blocks)})

    return rule


def _swapped(node: Node, rank: int) -> list[int]:
    a, b = (int(argument(node, i, f"dim{i - 1}")) % rank for i in (1, 2))
    dims = list(range(rank))
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _apart(*, dropped: bool) -> Rule:
    """A rule for operators along one dimension that is not split: a slice, a softmax, a selection or the tuple of all.

    Args:
        dropped: whether the result lacks the dimension.
    """

    def rule(node: Node, known: Known, nodes: Nodes) -> Applied | None:
        name = ref(node.args[0])
        if name is None:
            return None
        dim = int(argument(node, 1, "dim", 0)) % len(nodes.shape(name))
        given, out = known(name), known(node.name)
        if given is None and out is not None:
            given = Shard(out.dim + (dropped and out.dim >= dim), out.blocks)
        if given is None or given.dim == dim:
            return None
        return Applied(Shard(given.dim - (dropped and given.dim > dim), given.blocks), {name: given})

    return rule


def reduced(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Means and sums over dimensions that are not split."""
    name, dims = ref(node.args[0]), argument(node, 1, "dim")
    if name is None or not dims:
        return None
    rank = len(nodes.shape(name))
    gone = sorted({int(dim) % rank for dim in dims})
    kept = list(range(rank)) if argument(node, 2, "keepdim", False) else [dim for dim in range(rank) if dim not in gone]
    given, out = known(name), known(node.name)
    if given is None and out is not None:
        given = Shard(kept[out.dim], out.blocks)
    if given is None or given.dim in gone:
        return None
    return Applied(Shard(kept.index(given.dim), given.blocks), {name: given})


def _pieces(count: Callable[[Node, int], int | None]) -> Rule:
    """A rule for operators that cut a tensor in equal pieces; the layout of the tuple is that of each piece.

    Args:
        count: pieces, from the node and the size of the dimension; None if they are not equal.
    """

    def rule(node: Node, known: Known, nodes: Nodes) -> Applied | None:
        name = ref(node.args[0])
        if name is None:
            return None
        shape = nodes.shape(name)
        dim = int(argument(node, 2, "dim", 0)) % len(shape)
        given, out = known(name), known(node.name)
        number = count(node, shape[dim])
        if out is None and given is not None:
            blocks, rest = (given.blocks, 0) if given.dim != dim else divmod(given.blocks, number or 0x7FFFFFFF)
            out = Shard(given.dim, blocks) if blocks and not rest else None
        if out is None or number is None:
            return None
        return Applied(out, {name: Shard(out.dim, out.blocks * (number if out.dim == dim else 1))})

    return rule


def _chunks(node: Node, extent: int) -> int | None:
    number = int(argument(node, 1, "chunks"))
    return None if extent % number else number


def _splits(node: Node, extent: int) -> int | None:
    sizes = argument(node, 1, "split_size" if node.target.endswith(".Tensor") else "split_sizes")
    size = sizes if isinstance(sizes, int) else sizes[0] if isinstance(sizes, list) and len(set(map(str, sizes))) == 1 else None
    return None if not isinstance(size, int) or extent % size else extent // size


def piece(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """One piece of a tuple lies as the tuple says."""
    name = ref(node.args[0])
    found = known(node.name) or (known(name) if name else None)
    return None if found is None or name is None else Applied(found, {name: found})


def joined(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Concatenation along a dimension that is not split."""
    names = operands(node)
    dim = int(argument(node, 1, "dim", 0)) % len(nodes.shape(node.name))
    out = _known_out(node, known, (known(name) for name in names))
    return None if out is None or out.dim == dim else Applied(out, dict.fromkeys(names, out))


def stacked(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Tensors that are split alike, along a new dimension."""
    names = operands(node)
    dim = int(argument(node, 1, "dim", 0)) % len(nodes.shape(node.name))
    given = next((shard for name in names if (shard := known(name)) is not None), None)
    out = known(node.name)
    if given is None and out is not None and out.dim != dim:
        given = Shard(out.dim - (out.dim > dim), out.blocks)
    if given is None:
        return None
    return Applied(Shard(given.dim + (given.dim >= dim), given.blocks), dict.fromkeys(names, given))


def normalized(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Norms over the last dimensions, none of which is split."""
    names = operands(node)
    first = len(nodes.shape(node.name)) - len(node.args[1])
    out = known(node.name) or known(names[0])
    if out is None or out.dim >= first:
        return None
    return Applied(out, {names[0]: out, **dict.fromkeys(names[1:])})


def linear(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """x [..., K], weight [N, K], bias [N] -> [..., N]: columns (the result is split) or rows (it is summed)."""
    x, weight, bias = (ref(argument(node, i, name)) for i, name in enumerate(("input", "weight", "bias")))
    if x is None or weight is None:
        return None
    last = len(nodes.shape(node.name)) - 1
    return _product(node, known, x=x, weight=weight, bias=bias, last=last, transposed=True)


def addmm(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """bias [N], x [M, K], weight [K, N] -> [M, N]."""
    bias, x, weight = (ref(argument(node, i, name)) for i, name in enumerate(("self", "mat1", "mat2")))
    plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
    if x is None or weight is None or bias is None or not plain or len(nodes.shape(bias)) != 1:
        return None
    return _product(node, known, x=x, weight=weight, bias=bias, last=1, transposed=False)


def _product(node: Node, known: Known, *, x: str, weight: str, bias: str | None, last: int, transposed: bool) -> Applied | None:
    rest: dict[str, Shard | None] = {} if bias is None else {bias: None}
    out, given, split = known(node.name), known(x), known(weight)
    rows, columns = (1, 0) if transposed else (0, 1)
    if out is None and given is not None and given.dim != last:
        out = given
    if out is not None and out.dim != last:
        return Applied(out, {x: out, weight: None, **rest})
    if given is not None or (split is not None and split.dim == rows):
        blocks = given.blocks if given is not None else split.blocks if split is not None else 1
        return Applied(None, {x: Shard(last, blocks), weight: Shard(rows, blocks), **rest}, summed=True)
    of_bias = known(bias) if bias is not None else None
    found = out or split or of_bias
    if found is None:
        return None
    own: dict[str, Shard | None] = {} if bias is None else {bias: Shard(0, found.blocks)}
    return Applied(Shard(last, found.blocks), {x: None, weight: Shard(columns, found.blocks), **own})


def matmul(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """[..., M, K] x [..., K, N]: leading dimensions split alike, columns, or rows."""
    a, b = (ref(argument(node, i, name)) for i, name in enumerate(("self", "other")))
    if a is None or b is None:
        return None
    shape_a, shape_b, shape = nodes.shape(a), nodes.shape(b), nodes.shape(node.name)
    if len(shape_b) == 2 and nodes.node_of[b].kind == "param":
        return _product(node, known, x=a, weight=b, bias=None, last=len(shape) - 1, transposed=False)
    rank = len(shape)
    if len(shape_a) != rank or len(shape_b) != rank or rank < 3:
        return None
    out = known(node.name) or known(a) or known(b)
    if out is None or out.dim >= rank - 2:
        return None
    return Applied(out, {a: _aligned(out, shape_a, shape), b: _aligned(out, shape_b, shape)})


def attention(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """Queries, keys and values [..., H, L, E], split by heads; a mask is split with them where it tells heads apart."""
    q, k, v = (ref(argument(node, i, name)) for i, name in enumerate(("query", "key", "value")))
    mask = ref(argument(node, 3, "attn_mask"))
    if q is None or k is None or v is None:
        return None
    out = known(node.name) or known(q) or known(k) or known(v)
    rank = len(nodes.shape(node.name))
    if out is None or out.dim >= rank - 2:
        return None
    heads = {nodes.shape(name)[out.dim] for name in (q, k, v)}
    if len(heads) > 1 and out.blocks != 1:
        return None
    needs: dict[str, Shard | None] = dict.fromkeys((q, k, v), out)
    return Applied(out, needs if mask is None else {**needs, mask: _aligned(out, nodes.shape(mask), nodes.shape(node.name))})


def table(node: Node, known: Known, nodes: Nodes) -> Applied | None:
    """An embedding by rows: a member looks up the ids whose rows it holds, and the rest adds zeros."""
    weight, ids = ref(argument(node, 0, "weight")), ref(argument(node, 1, "indices"))
    plain = not argument(node, 3, "scale_grad_by_freq", False) and not argument(node, 4, "sparse", False)
    if weight is None or ids is None or not plain or known(weight) != Shard(0):
        return None
    return Applied(None, {weight: Shard(0), ids: None}, summed=True)


_ELEMENTWISE = """
    abs.default add.Scalar add.Tensor alias.default celu.default clamp.default clamp_min.default clone.default contiguous.default
    detach.default div.Scalar div.Tensor dropout.default elu.default erf.default exp.default expand.default expand_as.default
    gelu.default hardswish.default leaky_relu.default log.default masked_fill.Scalar masked_fill.Tensor maximum.default
    minimum.default mish.default mul.Scalar mul.Tensor neg.default pow.Tensor_Scalar reciprocal.default relu.default relu6.default
    rsqrt.default rsub.Scalar sigmoid.default silu.default softplus.default sqrt.default square.default sub.Scalar sub.Tensor
    tanh.default to.dtype where.self
"""
_VIEWS = """
    flatten.using_ints reshape.default squeeze.dim squeeze.dims unflatten.int unsqueeze.default view.default
    _unsafe_view.default
"""

RULES: dict[str, Rule] = {
    **{f"aten.{name}": elementwise for name in _ELEMENTWISE.split()},
    **{f"aten.{name}": view for name in _VIEWS.split()},
    "aten.transpose.int": _moved(_swapped),
    "aten.permute.default": _moved(lambda node, rank: [int(dim) % rank for dim in argument(node, 1, "dims")]),
    "aten.t.default": _moved(lambda node, rank: [1, 0] if rank == 2 else None),
    **dict.fromkeys(("aten.slice.Tensor", "aten.softmax.int", "aten._softmax.default"), _apart(dropped=False)),
    **dict.fromkeys(("aten.select.int", "aten.unbind.int"), _apart(dropped=True)),
    "aten.mean.dim": reduced,
    "aten.sum.dim_IntList": reduced,
    "aten.chunk.default": _pieces(_chunks),
    **dict.fromkeys(("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default"), _pieces(_splits)),
    "_operator.getitem": piece,
    "aten.cat.default": joined,
    "aten.stack.default": stacked,
    "aten.layer_norm.default": normalized,
    "aten.rms_norm.default": normalized,
    "aten.linear.default": linear,
    "aten.addmm.default": addmm,
    "aten.mm.default": matmul,
    "aten.matmul.default": matmul,
    "aten.bmm.default": matmul,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.embedding.default": table,
}
"""Operator -> its rule."""
