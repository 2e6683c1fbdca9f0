"""Quantised messages: how many bytes a tensor takes on an edge, and what encoding and decoding it costs.

A value of a sample becomes one of 2^bits levels between the sample's least and largest value, and floor(32/bits) levels lie in a
word. Tensors of integers and of other types than the graph's travel as they are. `worker.py` does the work.

Sources: PipeEdge (DSD 2022) for the form of a message; Banner et al., "Post training 4-bit quantization of convolutional networks
for rapid-deployment" (NeurIPS 2019), section 2 and appendix, for the clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from gpp.graph.op_graph import Tensor, dtype_bytes

WORD_BITS = 32
WORD_BYTES = WORD_BITS // 8
LEAST_BITS, MOST_BITS = 2, 16


def per_word(bits: int) -> int:
    """Values in a word."""
    return WORD_BITS // bits


def useful_bits() -> tuple[int, ...]:
    """Numbers of bits that `auto` chooses from, descending: with any other, one bit more would take no more words."""
    return tuple(bits for bits in range(MOST_BITS, LEAST_BITS - 1, -1) if bits == MOST_BITS or per_word(bits) > per_word(bits + 1))


def most_bits(bytes_of: Callable[[int], float], room: float) -> int:
    """The choice of `auto`: 0 (values as they are) where that has room, else the most bits that have it, else the least bits.

    Args:
        bytes_of: bits -> bytes.
    """
    return next((bits for bits in (0, *useful_bits()) if bytes_of(bits) <= room), LEAST_BITS)


ANNOUNCE_BYTES = 16
"""Before a message whose bits may change: the bits of a later one; all that follows stays aligned for any type."""


def coded(tensor: Tensor) -> bool:
    """Whether a tensor's values can be quantised."""
    return tensor.values != "other"


def values_per_sample(tensor: Tensor, dtype: str) -> int:
    """Values that a tensor of the graph's dtype has for each sample."""
    return math.ceil(tensor.bytes_per_sample / dtype_bytes(dtype))


def header_words(dtype: str) -> int:
    """Words before a sample's levels: its least value and the distance of two levels, each in the tensor's own type or float32."""
    return 2 * max(dtype_bytes(dtype), WORD_BYTES) // WORD_BYTES


def words(values: int, bits: int, dtype: str) -> int:
    """Words of one sample with so many values, header included."""
    return header_words(dtype) + -(-values // per_word(bits))


def sent_bytes(tensor: Tensor, bits: int, dtype: str) -> float:
    """Bytes that a tensor takes in a message, for each sample.

    Args:
        bits: the edge's bits; 0: values travel as they are.
    """
    if not bits or not coded(tensor):
        return tensor.bytes_per_sample
    return float(WORD_BYTES * words(values_per_sample(tensor, dtype), bits, dtype))


class CodecWork(NamedTuple):
    """The work of a codec on a message: bytes read and written in a device's own memory, and kernels launched."""

    moved: float = 0.0
    kernels: int = 0

    def plus(self, other: CodecWork) -> CodecWork:
        return CodecWork(self.moved + other.moved, self.kernels + other.kernels)


def encoding(tensors: Iterable[Tensor], dtype: str, samples: int, bits: int, *, clip: bool) -> CodecWork:
    """The work of encoding a message's tensors, kernel by kernel as `worker.py` does it.

    What has one number for each sample is too small to count, but for its kernels.
    """
    total = CodecWork()
    for tensor in tensors if bits else ():
        if coded(tensor):
            sizes = _Sizes.of(tensor, dtype, samples, bits)
            levels, later = sizes.values, sizes.values - sizes.body
            # The least and the largest value; then less, times, round and convert, each read and written; then put into words.
            moved = (
                sizes.exact * levels * (1 + 3 * 2) + (sizes.exact + WORD_BYTES) * levels + WORD_BYTES * (2 * sizes.body + 5 * later)
            )
            kernels = 1 + 4 + 4 + 2 + 1 + 2 * sizes.slots_after
            if clip:
                moved += sizes.exact * levels * ((2 + 1 if tensor.values == "gelu" else 1) + 2 * 2)
                kernels += 3 + 3 + 2
            total = total.plus(CodecWork(moved, kernels)).plus(sizes.conversion)
    return total


def decoding(tensors: Iterable[Tensor], dtype: str, samples: int, bits: int) -> CodecWork:
    """The work of decoding a message's tensors."""
    total = CodecWork()
    for tensor in tensors if bits else ():
        if coded(tensor):
            sizes = _Sizes.of(tensor, dtype, samples, bits)
            # Of each slot of a word: shift, mask, convert; then times and plus.
            moved = sizes.values * (5 * WORD_BYTES + sizes.exact + 4 * sizes.exact)
            total = total.plus(CodecWork(moved, 1 + 3 * (1 + sizes.slots_after) + 2)).plus(sizes.conversion)
    return total


class _Sizes(NamedTuple):
    """The sizes of a tensor in a message.

    Args:
        values: the number of values of all samples.
        body: words of levels of all samples.
        slots_after: levels of a word after its first, where any sample has some.
        exact: bytes of a number in which levels are computed.
        conversion: from or to the tensor's own type.
    """

    values: int
    body: int
    slots_after: int
    exact: int
    conversion: CodecWork

    @classmethod
    def of(cls, tensor: Tensor, dtype: str, samples: int, bits: int) -> _Sizes:
        values, own = values_per_sample(tensor, dtype), dtype_bytes(dtype)
        width, exact = -(-values // per_word(bits)), max(own, WORD_BYTES)
        conversion = CodecWork(float(samples * values * (own + exact)), 1) if own != exact else CodecWork()
        return cls(samples * values, samples * width, -(-values // width) - 1, exact, conversion)


@cache
def clip_factor(bits: int) -> float:
    """The clipping range of values, in scales of a Laplace distribution: W(3 x 4^bits), Lambert's function.

    What clipping at alpha loses, 2 b^2 exp(-alpha / b), and what rounding loses, alpha^2 / (3 x 4^bits), are least together there.
    """
    target = math.log(3.0) + bits * math.log(4.0)
    factor = target  # Newton's method on factor + log(factor) = target, which is convex: from above it falls to the root
    while abs(excess := factor + math.log(factor) - target) > 1e-13 * target:
        factor -= excess / (1.0 + 1.0 / factor)
    return factor
