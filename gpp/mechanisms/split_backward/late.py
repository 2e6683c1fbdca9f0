"""The two halves of a backward: gradients of the data at once, gradients of the weights when they are asked for.

An operator that reads trained weights is called so that autograd differentiates it with respect to its data alone. What its
weights' gradients are made of, its inputs and the gradient of its output, comes to a queue; `LateGradients.deliver` empties it. For
the operators of `FORMULAS` the gradients are those kernels of ATen that autograd calls, with a mask that leaves the data out. Any
other operator has a small graph of its own, which is walked twice: down to the data, then down to the weights.

The sums are autograd's, to the last bit. Autograd adds up what the uses of a parameter give in one backward, the last use in the
forward first, and then adds the sum to `.grad`; the queue is filled in that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpp.capture.copies import narrowing

Gradients = Sequence[Tensor | None]

Target = Tensor | GradientEdge
"""A parameter; or where the gradient of a tensor comes in that is computed from parameters alone, which itself may be let go of."""


class _Entry(NamedTuple):
    """Gradients to be made.

    Args:
        make: makes those of the targets.
        fresh: whether nobody else has the memory of these.
        node: the operator of `FORMULAS` that they are of; "" for others.
        operands: what its formula makes them of, beside sizes: the gradient of its output, and its data where they are needed.
    """

    targets: Sequence[Target]
    make: Callable[[], Gradients]
    fresh: bool
    node: str = ""
    operands: tuple[Tensor, ...] = ()


class LateGradients:
    """The operands of one micro-batch's weight gradients, in the order in which the gradients are added up."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.divided: tuple[Tensor, Tensor] | None = None
        """Of an operator whose gradient of the data is divided: the gradient of its output, by rows, and its weight."""

    def add(
        self,
        targets: Sequence[Target],
        make: Callable[[], Gradients],
        *,
        fresh: bool,
        node: str = "",
        operands: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue gradients; arguments as `_Entry` has them."""
        self._entries.append(_Entry(targets, make, fresh, node, operands))

    def hand_over(self) -> dict[str, tuple[Tensor, ...]]:
        """Operator -> what the gradients of its weights are made of, which somebody else makes; they leave the queue."""
        given = {entry.node: entry.operands for entry in self._entries if entry.node}
        self._entries = [entry for entry in self._entries if not entry.node]
        return given

    def deliver(self) -> None:
        """Make all of them, and add them to the `.grad` of the parameters; each is let go of as soon as it is used."""
        uses = Counter(_key(target) for entry in self._entries for target in entry.targets)
        # A parameter may be reached through such a tensor too, so all wait until its gradient is known.
        waits = any(not isinstance(target, Tensor) for entry in self._entries for target in entry.targets)
        sums: dict[tuple[int, int], tuple[Target, Tensor, bool]] = {}
        self._entries.reverse()
        with torch.no_grad():
            while self._entries:
                targets, make, fresh, *_ = self._entries.pop()
                for target, gradient in zip(targets, make(), strict=True):
                    key = _key(target)
                    uses[key] -= 1
                    if gradient is not None:
                        sums[key] = (target, sums[key][1] + gradient, True) if key in sums else (target, gradient, fresh)
                    if not waits and not uses[key] and key in sums:
                        _accumulate(*sums.pop(key))
        if sums:
            _run([target for target, _, _ in sums.values()], [gradient for _, gradient, _ in sums.values()])


def _target(tensor: Tensor) -> Target:
    return tensor if tensor.is_leaf else get_gradient_edge(tensor)


def _key(target: Target) -> tuple[int, int]:
    return (id(target), -1) if isinstance(target, Tensor) else (id(target.node), target.output_nr)


def _accumulate(param: Target, gradient: Tensor, fresh: bool) -> None:
    """Add one micro-batch's gradient to `.grad`, as autograd does. Both have the parameter's shape."""
    if not isinstance(param, Tensor) or not fresh or gradient.is_sparse or getattr(param, "_post_accumulate_grad_hooks", None):
        _run([param], [gradient])
    elif param.grad is not None:
        param.grad.add_(gradient)
    elif gradient.stride() == param.stride():
        param.grad = gradient
    else:
        _run([param], [gradient])


def _run(roots: Sequence[Target], gradients: Sequence[Tensor]) -> None:
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


Formula = Callable[..., Gradients]
"""(gradient of the output, needs, *saved) -> gradients of weight and bias, where they are needed."""


class Late:
    """Calls the operators of one stage so that the gradients of their weights are left for later.

    `queue` is that of the backward under way; `anchor` is what an operator without differentiable data makes its output depend
    on, so that a backward comes by.
    """

    def __init__(self, device: torch.device) -> None:
        self.queue = LateGradients()
        self._device = device
        self.own_columns: dict[str, tuple[int, int]] = {}
        """Linear operator of which this device makes these columns [lo, hi) of the data's gradient alone; the others are zero."""
        self.between: Callable[[LateGradients, dict[str, Tensor]], dict[str, dict[str, Tensor]]] | None = None
        """(What the first half has left, gradients of the inputs) -> what goes to other devices between the halves: tensors by
        direction and by name. None: the gradients of the inputs, as they are."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def take(self) -> LateGradients:
        """The queue that the last backward has left. The next backward begins one of its own."""
        found, self.queue = self.queue, LateGradients()
        return found

    def of(self, node: str, target: str, late: Sequence[bool], operator: Callable[..., Any]) -> Callable[..., Any]:
        """What calls an operator in its place.

        Args:
            node, target: its name in the captured model, and what it is.
            late: of each tensor among its arguments, in order, whether it is a weight or computed from weights alone.
        """
        if target not in FORMULAS:
            return _Apart.calling(self, operator, tuple(late))
        call, kind, site = FORMULAS[target], self._device.type, Site(self, node)
        casts = narrowing().casts_itself(target)

        def cast(value: Any) -> Any:
            # As the operator would; autograd differentiates it.
            wide = isinstance(value, Tensor) and value.dtype is torch.float32
            return value.to(torch.get_autocast_dtype(kind)) if wide else value

        def called(*args: Any, **kwargs: Any) -> Any:
            if casts and torch.is_autocast_enabled(kind):
                args, kwargs = tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
            return call(site, *args, **kwargs)

        return called


class Site(NamedTuple):
    """An operator of `FORMULAS`, by its name in the captured model."""

    late: Late
    node: str

    def leave(self, out: Tensor, weight: Tensor | None, bias: Tensor | None, formula: Formula, data: Tensor, *saved: Any) -> Tensor:
        """`out`, whose backward queues the gradients of the weights.

        Args:
            out: made of data and of detached weights; no view.
            data: what the formula takes of the operator's input.
            saved: weights and numbers that it takes behind that.
        """
        needs = (weight is not None and weight.requires_grad, bias is not None and bias.requires_grad)
        targets = tuple(map(_target, (t for t, needed in zip((weight, bias), needs, strict=True) if needed and t is not None)))
        anchor = None if out.requires_grad else self.late.anchor
        return _Leave.apply(out, anchor, (self, targets, needs, formula, (data, *saved)))  # type: ignore[return-value]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor | None, call: tuple[Any, ...]) -> Tensor:  # type: ignore[override]
        *ctx.call, saved = call
        ctx.form = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, Tensor)])
        # In place: it is the same tensor to who writes into it, where a view of it would be refused.
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        site, targets, needs, formula = ctx.call
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors).detach() if value is None else value for value in ctx.form]
        site.late.queue.add(
            targets,
            lambda: [g for g in formula(gradient, needs, *saved) if g is not None],
            fresh=True,
            node=site.node,
            operands=(gradient, saved[0]),
        )
        return gradient, None, None


class _Linear(torch.autograd.Function):
    """The most frequent operator in one step, which spares autograd's own nodes: [.., K] -> [.., M]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, anchor: Tensor | None, call: tuple[Site, Tensor, Tensor | None]) -> Tensor:  # type: ignore[override]
        ctx.call = call
        _, weight, bias = call
        detached = weight.detach()
        # By rows, as `linear` computes it.
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        # Whichever is not needed is not kept: rows for the weight, the weight for the rows.
        ctx.save_for_backward(rows if weight.requires_grad else None, detached if anchor is None else None)
        ctx.by_columns = rows.stride(0) == 1 and _by_columns(rows)
        # With rows that lie apart `linear` adds the bias behind the product and sums its gradient as it is: other roundings.
        ctx.apart = bias is not None and rows is not input and not input.is_contiguous()
        out = torch.mm(rows, detached.t()) if bias is None or ctx.apart else torch.addmm(bias, rows, detached.t())
        # Not as a view, into which nobody may write behind a function like this one.
        out = out if rows is input else torch.ops.aten._unsafe_view.default(out, [*input.shape[:-1], out.shape[1]])
        return out if bias is None or not ctx.apart else out.add(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        site, weight, bias = ctx.call
        rows, detached = ctx.saved_tensors
        flat = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        targets, needs_bias = list[Target](), False
        if rows is not None:
            targets, rows = [_target(weight)], rows.detach()
        if bias is not None and bias.requires_grad:
            needs_bias = True
            targets.append(_target(bias))
        by_columns = _by_columns(weight.t())
        operands, own = (flat,) if rows is None else (flat, rows), gradient if ctx.apart else flat
        site.late.queue.add(
            targets,
            lambda: linear_gradients(own, rows, needs_bias, by_columns),
            fresh=True,
            node=site.node,
            operands=operands,
        )
        if detached is None:
            return None, None, None
        if site.node in site.late.own_columns:
            site.late.queue.divided = flat, detached
            made = flat.new_zeros(flat.shape[0], detached.shape[1])
            lo, hi = site.late.own_columns[site.node]
            made[:, lo:hi] = in_columns(flat, detached[:, lo:hi])
        else:
            made = detached.t().mm(flat.t()).t() if ctx.by_columns else flat.mm(detached)
        return (made if flat is gradient else made.reshape(*gradient.shape[:-1], -1)), None, None


def in_columns(gradient: Tensor, weight: Tensor) -> Tensor:
    """Columns of the data's gradient of a linear operator, [N, columns]: the same bits wherever they are made. `gradient` is that
    of its output, by rows, [N, M], and `weight` these columns of its weight, [M, columns]."""
    return gradient.contiguous().mm(weight.contiguous())


def _by_columns(matrix: Tensor) -> bool:
    """Whether autograd takes a [rows, columns] matrix for one that lies by columns, and makes a gradient that lies likewise."""
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


def _linear(site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(input, None if input.requires_grad else site.late.anchor, (site, weight, bias))  # type: ignore[return-value]


def linear_gradients(gradient: Tensor, rows: Tensor | None, needs_bias: bool, by_columns: bool) -> list[Tensor]:
    """Of a linear operator.

    Args:
        gradient: of its output, [N, M] or [.., M].
        rows: its input, [N, K]; None where the weight is not trained.
        by_columns: whether the weight's transpose lies by columns.
    """
    made, flat = list[Tensor](), gradient.reshape(-1, gradient.shape[-1])
    if rows is not None:
        made.append(flat.t().mm(rows) if by_columns else rows.t().mm(flat).t())
    return [*made, gradient.sum(tuple(range(gradient.dim() - 1)))] if needs_bias else made


def _convolution(call: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def convolution(
        site: Site,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        out = call(input, weight.detach(), bias if bias is None else bias.detach(), stride, padding, dilation, groups)
        each = [several(value, dims) for value in (stride, padding, dilation)]
        return site.leave(out, weight, bias, convolution_gradients, input, weight.detach(), each, [0] * dims, groups)

    return convolution


def several(value: Any, dims: int) -> list[int]:
    """A setting of a convolution, a number for each dimension."""
    return list(value) * (dims // len(value)) if isinstance(value, (list, tuple)) else [value] * dims


def convolution_gradients(
    gradient: Tensor,
    needs: tuple[bool, bool],
    input: Tensor,
    weight: Tensor,
    several: list[list[int]],
    none: list[int],
    groups: int,
) -> Gradients:
    """The gradients of a convolution's weight and bias.

    Args:
        gradient: [batch, out channels, ...] of the output.
        weight: [out channels, in channels / groups, ...]; only its form counts.
        several: stride, padding and dilation, a number for each dimension; `none` has as many zeros.
    """
    sizes = [weight.shape[0]] if needs[1] else None
    backward = torch.ops.aten.convolution_backward.default
    return backward(gradient, input, weight, sizes, *several, False, none, groups, [False, *needs])[1:]


def _embedding(
    site: Site, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    out = torch.embedding(weight.detach(), indices, padding_idx, scale_grad_by_freq, False)
    return site.leave(out, weight, None, embedding_gradients, indices, weight.shape[0], padding_idx, scale_grad_by_freq, sparse)


def embedding_gradients(gradient: Tensor, needs: tuple[bool, bool], *saved: Any) -> Gradients:
    """The gradients of an embedding from that of its output, [..., dim]. `saved`: indices, rows of its table, options."""
    return torch.ops.aten.embedding_backward.default(gradient, *saved), None


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "aten.linear.default": _linear,
    "aten.conv1d.default": _convolution(torch.conv1d, 1),
    "aten.conv2d.default": _convolution(torch.conv2d, 2),
    "aten.conv3d.default": _convolution(torch.conv3d, 3),
    "aten.embedding.default": _embedding,
}
"""Operators by what calls them, with the arguments of their schemas."""


class _Apart(torch.autograd.Function):
    """An operator with a graph of its own."""

    @staticmethod
    def calling(late: Late, operator: Callable[..., Any], which: tuple[bool, ...]) -> Callable[..., Any]:
        """The operator, whose backward queues the gradients of its weights."""

        def called(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            data = [t if t.requires_grad and not later else None for t, later in zip(given, which, strict=True)]
            anchor = None if any(t is not None for t in data) else late.anchor
            return _Apart.apply(anchor, (late, operator, leaves, form, given, which), *data)

        return called

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, call: tuple[Any, ...], *data: Tensor | None) -> Any:  # type: ignore[override]
        late, operator, leaves, form, given, which = call
        own = [t.detach().requires_grad_(t.requires_grad) for t in given]
        found = iter(own)
        with torch.enable_grad():
            args, kwargs = tree_unflatten([next(found) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
            made = operator(*args, **kwargs)
        outputs = made if isinstance(made, (tuple, list)) else (made,)
        ctx.set_materialize_grads(False)
        ctx.late, ctx.edges = late, [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
        ctx.targets = [_target(t) for t, later in zip(given, which, strict=True) if later and t.requires_grad]
        ctx.weights = [t for t, later in zip(own, which, strict=True) if later and t.requires_grad]
        ctx.data = [None if t is None else get_gradient_edge(mine) for t, mine in zip(data, own, strict=True)]
        out = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(*[t for t, edge in zip(out, ctx.edges, strict=True) if edge is None])
        return out if isinstance(made, (tuple, list)) else out[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        pairs = [(edge, g) for edge, g in zip(ctx.edges, gradients, strict=True) if edge is not None and g is not None]
        roots, seeds, weights = [edge for edge, _ in pairs], [g for _, g in pairs], ctx.weights
        out: list[Any] = [None] * len(ctx.data)
        wanted = [i for i, edge in enumerate(ctx.data) if edge is not None]
        if wanted:
            found = torch.autograd.grad(roots, [ctx.data[i] for i in wanted], seeds, retain_graph=True, allow_unused=True)
            for i, gradient in zip(wanted, found, strict=True):
                out[i] = gradient
        ctx.late.queue.add(ctx.targets, lambda: torch.autograd.grad(roots, weights, seeds, allow_unused=True), fresh=False)
        return None, None, *out
