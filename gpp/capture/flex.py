"""Flex attention as plain attention: the same scores, modified by the user's functions, with their mask.

Torch compiles flex attention, or walks it as a higher-order operator, and neither can be cut into a stage. Without compilation it
computes the whole matrix of scores; so does what is traced here, and where the scores are left as they are it is
`scaled_dot_product_attention` with the mask, which need not. The functions of single places, (batch, head, query, key), are called
once with all places in place of `torch.vmap`, which an exported graph cannot hold as operators.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo._trace_wrapped_higher_order_op as indexing
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from gpp.errors import CaptureError


@contextlib.contextmanager
def as_attention(where: Callable[[traceback.StackSummary], str]) -> Iterator[None]:
    """A context in which flex attention, compiled or not, calls torch's ordinary operators.

    Args:
        where: the user's line in a stack.
    """

    def index(tensor: Tensor, places: Sequence[Tensor]) -> Tensor:
        if len(places) < tensor.dim():
            raise CaptureError(
                f"a function of flex attention indexes {len(places)} of the {tensor.dim()} dimensions of a tensor at "
                f"{where(traceback.extract_stack())}. Fix: index all of them at once, as in table[batch, query, key]"
            )
        return torch.ops.aten.index(tensor, places)

    with (
        mock.patch.object(torch_flex, "flex_attention_hop", _attend),
        mock.patch.object(torch_flex, "_vmap_for_bhqkv", _over_places),
        mock.patch.object(indexing, "mod_index", index),
        mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        # It refuses to be trained on a CPU, which has no kernel of its backward: plain operators need none.
        mock.patch.object(torch_flex, "_validate_device", lambda *_: None),
        # It would compile what it calls, and sets the tracer aside for that.
        mock.patch.object(torch_flex, "setup_compilation_env", contextlib.nullcontext),
        # A walk by `torch.vmap` over the blocks of a mask, of which only the function is used here.
        mock.patch.object(torch_flex, "_transpose_ordered", lambda *blocks: blocks),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _over_places(function: Callable[..., Tensor], prefix: Sequence[Any], suffix: Any = (), **_: Any) -> Callable[..., Tensor]:
    """A function of single places as one of all places: of scores [batch, heads, queries, keys] where it has a prefix, and the
    numbers of each dimension's places."""

    def of_all(*args: Any) -> Tensor:
        scores, places, rest = args[: len(prefix)], args[len(prefix) : len(prefix) + 4], args[len(prefix) + 4 :]
        spread = [place.view(-1, *[1] * (3 - i)) for i, place in enumerate(places)]
        return torch.as_tensor(function(*scores, *spread, *rest)).expand([len(place) for place in places])

    return of_all


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...], scale: float, _: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's operator returns: the result, and the logarithms of the sums and the maxima of the scores, to the base 2.

    What the caller does not use of them is no part of the graph.
    """
    mask_mod, (batch, heads) = block_mask[-1], block_mask[2].shape[:2]
    repeats = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (key, value))
    working = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(working) @ keys.to(working).transpose(-2, -1) * scale
    first, second, rows, columns = (torch.arange(n, device=query.device) for n in scores.shape)
    with indexing.TransformGetItemToIndex():
        mask = _over_places(mask_mod, ())(first[:batch], second[:heads], rows, columns)
        scores = _over_places(score_mod, (0,))(scores, first, second, rows, columns).to(working)
    scores = scores.masked_fill(~mask, -math.inf)
    if _leaves_alone(score_mod):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=repeats > 1)
    else:
        out = torch.ops.aten._safe_softmax(scores, -1).to(query.dtype) @ values
    return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _leaves_alone(score_mod: Callable[..., Any]) -> bool:
    """Whether a function of a score gives back the score that it is given, whatever that is."""
    probe = object()
    try:
        return score_mod(probe, 0, 0, 0, 0) is probe
    except Exception:  # it computes, and has been given nothing to compute with
        return False
