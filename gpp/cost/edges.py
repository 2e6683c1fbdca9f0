"""Quantised messages: how many bytes a tensor takes on an edge, and what encoding and decoding it costs.

Whoever predicts, plans, emulates or sends asks here. A value of a sample becomes one of 2^bits levels between the sample's least
and largest value, and floor(32/bits) levels lie in a word. Tensors of integers and of other types than the graph's travel as they
are. `gpp.runtime.transport.quantised` does the work.

Sources: PipeEdge (DSD 2022) for the form of a message; Banner et al., "Post training 4-bit quantization of convolutional networks
for rapid-deployment" (NeurIPS 2019), section 2 and appendix, for the clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple, final

from pydantic import Field

from gpp.errors import InvalidConfig, InvalidPlan, written
from gpp.graph.op_graph import OpGraph, Tensor, dtype_bytes
from gpp.settings import Count, Positive, settings

WORD_BITS = 32
WORD_BYTES = WORD_BITS // 8
LEAST_BITS, MOST_BITS = 2, 16

Bits = Annotated[int, Field(ge=LEAST_BITS, le=MOST_BITS)]


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


@final
@settings("strategy.edges")
class Edges:
    """The form of messages between stages, while serving.

    Args:
        bits: of a floating-point value in a message; `auto`: the most with which the links keep up with `target_rate`; None: values
            travel as they are.
        clip: whether values far from a sample's mean are clipped first, so that the others keep finer levels.
        target_rate: samples per second that `auto` keeps; None: what the slowest stage can do.
        window: messages over which `auto` measures a link, and for which its choice holds.
    """

    bits: Bits | Literal["auto"] | None = None
    clip: bool = False
    target_rate: Positive | None = None
    window: Count = 8

    def __post_init__(self) -> None:
        if self.target_rate is not None and self.bits != "auto":
            rule = f"is a rate that bits are chosen for, and strategy.edges.bits={written(self.bits)} is a choice"
            raise InvalidConfig(
                "strategy.edges.target_rate", self.target_rate, rule, "set strategy.edges.bits=auto, or leave it out"
            )

    def bits_of(self, tensors: Iterable[Tensor]) -> int:
        """Bits of an edge with these tensors, as planners assume them; 0: they travel as they are.

        `auto` is assumed at its least: it goes down as far as it must, so no link with fewer bits could be faster.
        """
        if self.bits is None or not any(coded(tensor) for tensor in tensors):
            return 0
        return LEAST_BITS if self.bits == "auto" else self.bits


PLAIN = Edges()

ANNOUNCE_BYTES = 16
"""Before a message whose bits may change: the bits of a later one; all that follows stays aligned for any type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The pace that senders keep under `auto`.

    Args:
        sample_s: seconds in which every link carries a sample.
        window: messages over which a link is measured.
    """

    sample_s: Positive
    window: Count


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


def check_bits(
    bits: Sequence[int], edges: Sequence[tuple[int, int]], tensors: Mapping[tuple[int, int], Sequence[Tensor]], graph: OpGraph
) -> None:
    """Prove that a plan's edges can have so many bits.

    Args:
        bits: the bits of each edge; empty where no message is quantised.

    Raises:
        InvalidPlan: not one number for each edge; out of range; nothing on the edge can be quantised; or the graph is trained.
    """
    if not bits:
        return
    if len(bits) != len(edges):
        raise InvalidPlan(f"edge_bits must have one number for each of the {len(edges)} edges, got {len(bits)}. Fix: plan again")
    for (s, t), number in zip(edges, bits, strict=True):
        if number and not LEAST_BITS <= number <= MOST_BITS:
            raise InvalidPlan(f"edge {s}->{t} has {number} bits, which must be 0 or {LEAST_BITS} to {MOST_BITS}. Fix: plan again")
        if number and not any(coded(tensor) for tensor in tensors[s, t]):
            raise InvalidPlan(f"edge {s}->{t} has {number} bits, but only integers go over it. Fix: give it 0 bits")
    if any(bits) and graph.differentiated:
        raise InvalidPlan("edge_bits are for inference; a gradient cannot pass a quantised message. Fix: set mode=inference")


class Work(NamedTuple):
    """The work of a codec on a message: bytes read and written in a device's own memory, and kernels launched."""

    moved: float = 0.0
    kernels: int = 0

    def plus(self, other: Work) -> Work:
        return Work(self.moved + other.moved, self.kernels + other.kernels)


def encoding(tensors: Iterable[Tensor], dtype: str, samples: int, bits: int, *, clip: bool) -> Work:
    """The work of encoding a message's tensors, kernel by kernel as `gpp.runtime.transport.quantised` does it.

    What has one number for each sample is too small to count, but for its kernels.
    """
    total = Work()
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
            total = total.plus(Work(moved, kernels)).plus(sizes.conversion)
    return total


def decoding(tensors: Iterable[Tensor], dtype: str, samples: int, bits: int) -> Work:
    """The work of decoding a message's tensors."""
    total = Work()
    for tensor in tensors if bits else ():
        if coded(tensor):
            sizes = _Sizes.of(tensor, dtype, samples, bits)
            # Of each slot of a word: shift, mask, convert; then times and plus.
            moved = sizes.values * (5 * WORD_BYTES + sizes.exact + 4 * sizes.exact)
            total = total.plus(Work(moved, 1 + 3 * (1 + sizes.slots_after) + 2)).plus(sizes.conversion)
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
    conversion: Work

    @classmethod
    def of(cls, tensor: Tensor, dtype: str, samples: int, bits: int) -> _Sizes:
        values, own = values_per_sample(tensor, dtype), dtype_bytes(dtype)
        width, exact = -(-values // per_word(bits)), max(own, WORD_BYTES)
        conversion = Work(float(samples * values * (own + exact)), 1) if own != exact else Work()
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
