"""Routing: who sends which samples to whom, as one static function.

A stage's micro-batch is a range of samples, which the stage's replicas split: all of them, or those whose turn it is. A message
is the intersection of a producer's and a consumer's range. Equal and unequal micro-batch sizes, replicated stages, forks, joins
and skip edges, forwards and backwards, all follow this one rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

Direction = str
"""`FORWARD` along the data, `BACKWARD` along the gradients: of a pass, and of the messages that it makes; "" for neither.

A mechanism may have directions of its own, for its passes and the messages that these need.
"""

FORWARD: Final[Direction] = "F"
BACKWARD: Final[Direction] = "B"

new = tuple.__new__
"""Makes a named tuple in a third of the time of its own constructor; a search makes many."""


class Piece(NamedTuple):
    """Samples [lo, hi) of one micro-batch on one replica."""

    device: int
    microbatch: int
    lo: int
    hi: int


class Message(NamedTuple):
    """Samples [lo, hi) that a producer's piece hands to a consumer's piece (gradients flow back)."""

    src_device: int
    src_microbatch: int
    dst_device: int
    dst_microbatch: int
    lo: int
    hi: int


def pieces(devices: Sequence[int], microbatch_size: int, num_samples: int, stride: int = 1) -> list[Piece]:
    """The pieces of a stage in sample order: micro-batch by micro-batch, replica by replica.

    The last micro-batch may be smaller; a replica without samples has no piece.

    Args:
        devices: of the replicas, one for each.
        stride: micro-batches in a row of which each replica has a part in one (`gpp.stage.Stage.stride`).

    >>> [tuple(piece) for piece in pieces([4, 5], microbatch_size=4, num_samples=6)]
    [(4, 0, 0, 2), (5, 0, 2, 4), (4, 1, 4, 5), (5, 1, 5, 6)]
    >>> [tuple(piece) for piece in pieces([4, 5], microbatch_size=4, num_samples=6, stride=2)]
    [(4, 0, 0, 4), (5, 1, 4, 6)]
    """
    out = list[Piece]()
    for m, start in enumerate(range(0, num_samples, microbatch_size)):
        size, own = min(microbatch_size, num_samples - start), devices if stride == 1 else devices[m % stride :: stride]
        n = len(own)
        for r, device in enumerate(own):
            lo, hi = start + size * r // n, start + size * (r + 1) // n
            if lo < hi:
                out.append(new(Piece, (device, m, lo, hi)))
    return out


def copies(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, int]]:
    """(sender, receiver) pairs of a message between two replicas of several devices that all hold the whole tensor.

    Every receiver gets it once, and the senders take turns; those that are too many send nothing.

    >>> copies((0, 1), (4, 5, 6, 7)), copies((4, 5), (0,))
    ([(0, 4), (1, 5), (0, 6), (1, 7)], [(4, 0)])
    """
    return [(src[i % len(src)], device) for i, device in enumerate(dst)]


def messages(src: list[Piece], dst: list[Piece]) -> list[Message]:
    """All non-empty intersections, in sample order; both lists cover the same samples in order.

    >>> [tuple(message) for message in messages(pieces([0], 2, 4), pieces([4, 5], 4, 4))]
    [(0, 0, 4, 0, 0, 2), (0, 1, 5, 0, 2, 4)]
    """
    out, i, j = list[Message](), 0, 0
    while i < len(src) and j < len(dst):
        maker, made, a_lo, a_hi = src[i]
        reader, read, b_lo, b_hi = dst[j]
        lo, hi = a_lo if a_lo > b_lo else b_lo, a_hi if a_hi < b_hi else b_hi
        if lo < hi:
            out.append(new(Message, (maker, made, reader, read, lo, hi)))
        if a_hi == hi:
            i += 1
        if b_hi == hi:
            j += 1
    return out
