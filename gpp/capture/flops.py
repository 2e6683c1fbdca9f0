"""The table of operators: the FLOPs of a call by a formula; or none, where bytes decide its time; or unknown, and then it is named.

    aten.addmm, aten.convolution, ...       torch's own formulas (`torch.utils.flop_counter`), and those that a user registers there
    attention of a CPU, products of groups  formulas of this file, where torch has none, or one that does not hold
    aten.add, aten.softmax, aten.sort, ...  none: their time is that of the bytes that they move
    anything else                           unknown

Attention counts as a fused kernel computes it: each pair of a query and a key that may meet, twice forwards and five times
backwards, where scores are made again. So causal attention counts half.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import gpp.capture.grouped  # noqa: F401  # registers the operators that have formulas here

_aten = torch.ops.aten


def _pairs(query: Tensor, key: Tensor, is_causal: bool) -> int:
    """Pairs that may meet of a query [batch, heads, queries, dim] and a key [batch, heads, keys, dim]; causal from the top left."""
    queries, keys = query.shape[-2], key.shape[-2]
    whole = min(queries, keys)
    met = whole * (whole + 1) // 2 + (queries - whole) * keys if is_causal else queries * keys
    return math.prod(query.shape[:-2]) * met


def _attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    return 2 * _pairs(query, key, is_causal) * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    **_: Any,
) -> int:
    """The scores again; gradients of scores and values; gradients of queries and keys."""
    return 2 * _pairs(query, key, is_causal) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _groups(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> int:
    """Of rows with the matrix of their group, each (`gpp.capture.grouped`).

    Args:
        rows: [S, k] with `matrices` [groups, k, n] in a forward and, transposed, for the gradient of the rows; torch's operator
            takes [k, S] with [S, n] for that of the matrices, and [groups, m, k] with [k, S] or [groups, k, n].
    """
    of_columns = rows.dim() == 3 and matrices.dim() == 2
    return 2 * math.prod(rows.shape[of_columns:]) * matrices.shape[-1]


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> int:
    """Each gradient takes what the forward takes. Torch's formula counts that of the weights as if there were no groups."""
    mask = rest[-1]
    spatial = (x if transposed else gradient).shape[2:]
    return 2 * x.shape[0] * math.prod(spatial) * weight.numel() * (bool(mask[0]) + bool(mask[1]))


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _bilinear(a: Tensor, b: Tensor, c: Tensor, of_a: list[int], of_b: list[int], of_c: list[int], *_: Any, **__: Any) -> int:
    """Three tensors with dimensions put in: a product of three, and a sum."""
    shapes = []
    for tensor, dims in ((a, of_a), (b, of_b), (c, of_c)):
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


def _distances(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """[..., P, M] and [..., R, M]: a difference, a power and a sum."""
    return 3 * a.numel() * b.shape[-2]


def _recurrence(x: Tensor, into: Tensor, within: Tensor, *_: Any, **__: Any) -> int:
    """Every matrix multiplies every time step's vector; x is [steps, batch, width]."""
    return 2 * x.shape[0] * x.shape[1] * (into.numel() + within.numel())


def _fourier(x: Tensor, dims: Sequence[int], *_: Any, **__: Any) -> int:
    """5 n log2 n of each transform of n numbers: Cooley and Tukey, 1965."""
    return round(5 * x.numel() * math.log2(max(2, math.prod(x.shape[dim] for dim in dims))))


def _cubic(share: float) -> Callable[..., int]:
    """`share` of n^3 for each matrix [..., n, n]: Golub and Van Loan, Matrix Computations."""
    return lambda matrix, *_, **__: round(share * matrix.numel() * matrix.shape[-1])


def _solved(matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """A factorisation, and two triangles for each column of the right side."""
    return round(2 / 3 * matrix.numel() * matrix.shape[-1]) + 2 * matrix.shape[-1] * right.numel()


def _triangle(matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return matrix.shape[-1] * right.numel()


FORMULAS: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.convolution_backward: _convolution_backward,
    _aten._grouped_mm: _groups,
    torch.ops.gpp.grouped_mm_forward: _groups,
    torch.ops.gpp.grouped_mm_gradient: _product,
    _aten.mv: lambda matrix, vector: 2 * matrix.numel(),
    _aten.addmv: lambda added, matrix, vector, **_: 2 * matrix.numel(),
    _aten.dot: lambda a, b: 2 * a.numel(),
    _aten.vdot: lambda a, b: 2 * a.numel(),
    _aten.addbmm: lambda added, a, b, **_: _product(a, b),
    _aten._trilinear: _bilinear,
    _aten._int_mm: _product,
    _aten._euclidean_dist: _distances,
    _aten._cdist_forward: _distances,
    _aten._cdist_backward: lambda gradient, a, b, *_, **__: _distances(a, b),
    _aten.mkldnn_rnn_layer: _recurrence,
    _aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrence(*args, **kwargs),
    _aten._fft_r2c: _fourier,
    _aten._fft_c2c: _fourier,
    _aten._fft_c2r: _fourier,
    _aten.linalg_cholesky_ex: _cubic(1 / 3),
    _aten.linalg_lu_factor_ex: _cubic(2 / 3),
    _aten._linalg_det: _cubic(2 / 3),
    _aten._linalg_slogdet: _cubic(2 / 3),
    _aten.linalg_inv_ex: _cubic(2),
    _aten._linalg_solve_ex: _solved,
    _aten.linalg_lu_solve: lambda factors, pivots, right, **_: 2 * _triangle(factors, right),
    _aten.linalg_solve_triangular: _triangle,
}
"""Operators as torch dispatches them -> FLOPs of a call with these arguments, where torch has no formula, or none that holds."""

_FEW = re.compile(
    r"_?(to_copy|to_dense|copy|chunk_cat|lazy_clone|clone|lift|lift_fresh|cat|stack|block_diag|roll|rot90|flip|repeat|repeat_interleave|tril|triu)"
    r"|fill|zero|resize|set|detach|diag_embed|(new_|rand|zeros|ones|full|empty)\w*|\w+_like|(un)?squeeze|t|transpose|unsafe_split\w*|as_strided"
    r"|.*pad\dd(_backward)?|.*pad_nd|_unsafe_view|view_as_(real|complex)|.*_copy|.*_scatter|(slice|select|diagonal|unfold)_backward"
    r"|_?embedding\w*|_?(unsafe_)?(masked_)?index(_\w+)?|gather|scatter(_\w+)?|masked_(select|scatter|fill)(_\w+)?|take|put|where|nonzero\w*"
    r"|im2col|col2im|pixel_(un)?shuffle|channel_shuffle|affine_grid_generator\w*|_?grid_sampler_\w+|_?upsample_\w+|_?unique\w*"
    r"|sum|nansum|mean|prod|(var|std)(_mean)?|a?(min|max)|_?aminmax|arg(max|min|sort)|any|all|dist|(native_)?norm|_?linalg_vector_norm|logsumexp"
    r"|trace|cum(sum|prod|max|min)\w*|_cum(max|min)_helper|_?logcumsumexp|sort|msort|topk|kthvalue|(nan)?median|mode|searchsorted|bucketize"
    r"|histc|bincount|count_nonzero|value_selecting_reduction_backward|renorm|_weight_norm\w*|_?(log_|safe_|masked_)?softmax(_backward(_data)?)?"
    r"|_?(native_|cudnn_|fused_)*(batch|layer|group|instance|rms)_norm(_\w+)?|_thnn_fused_(lstm|gru)_cell(_backward)?(_impl)?"
    r"|.*_loss(2d|_nd)?(_forward|_backward)?|binary_cross_entropy(_\w+)?|.*pool\dd(_with_indices)?(_backward)?|max_unpool\dd"
    r"|_?(native_|fused_)?dropout(_backward)?|_masked_scale|bernoulli|normal|uniform|exponential|random|geometric|multinomial|poisson|log_normal"
    r"|cauchy|binomial|_standard_gamma\w*|_sample_dirichlet|_dirichlet_grad|equal|is_same_size|_local_scalar_dense|_?\w*assert\w*|_fused_sdp_choice"
    r"|(gelu|elu|threshold|hard\w+|leaky_relu|log_sigmoid|soft(plus|shrink)|glu|mish)_backward|hardswish|log_sigmoid_forward|glu|_?prelu\w*"
    r"|rrelu_with_noise\w*|addcmul|addcdiv|addr|lerp|complex|polar|(linalg_)?cross|rsub|floor_divide|isin|_?fake_quantize\w*|_pack_padded_sequence"
    r"|_efficientzerotensor|_reshape_alias|segment_reduce|_segment_reduce_backward|_is_(all|any)_true|_linalg_check_errors|_foreach_\w+|sym_\w+"
)
"""Names of torch's operators that take a few operations for each byte and have no tag that says so."""


def _plain(operator: Any) -> Any:
    """The operator that returns what this one writes in place; itself for any other."""
    if not isinstance(operator, torch._ops.OpOverload) or not operator._schema.is_mutable:
        return operator
    packet = getattr(getattr(torch.ops, operator.namespace), operator._schema.name.split("::")[1].removesuffix("_"), None)
    return getattr(packet, operator._overloadname, operator)


def _takes_few(operator: Any) -> bool:
    """Whether an operator takes few operations for each byte that it moves, so that its time is that of the bytes."""
    if getattr(operator, "namespace", "") not in ("aten", "prims"):
        return getattr(operator, "namespace", "") == "prim"  # asks where a tensor is, and the like
    if operator.is_view or {torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy} & set(operator.tags):
        return True
    return bool(_FEW.fullmatch(operator._schema.name.split("::")[1].removesuffix("_")))


class Counted(TorchDispatchMode):
    """What is called inside: its FLOPs, and the names of operators that are neither counted nor known to take few.

    Args:
        flops: their sum.
        unknown: names as `aten.linalg_qr.default`, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.unknown: dict[str, None] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = _plain(operator)
        packet = getattr(plain, "_overloadpacket", plain)
        formula, registered = FORMULAS.get(packet), flop_registry.get(packet)
        if formula is None and registered is None and getattr(operator, "namespace", "prim") != "prim":
            with self:  # an operator that torch defines by others, where autograd has not taken it apart
                if (out := operator.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        out = operator(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs)
        elif registered is not None:
            self.flops += registered(*args, **kwargs, out_val=out)
        elif not _takes_few(plain) and any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves((args, kwargs))):
            self.unknown.setdefault(str(operator))
        return out
