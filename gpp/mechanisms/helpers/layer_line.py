"""LayerPipe's line of work: forwards and weight gradients whole, input gradients divisible, dealt out over processors.

By layers from the first to the last the line is

    F1 W1 | I2 | F2 W2 | I3 | F3 W3 | ...

with F a forward, W the gradients of the weights and I those of the inputs, of one micro-batch; nobody needs I1. Every processor
takes an interval of the line. F and W are whole; an I may be cut anywhere. So a neighbour helps with an I, or takes
the W of the layer on the border.

The paper (LayerPipe, arXiv 2108.06629) says that the two gradients of a layer are made side by side (intra-layer), and that the
gradients of the inputs are divided between two layers that follow each other (inter-layer). Its body is not public, so line,
bisection and both forms of `intra` are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Intra = Literal["neighbour", "anywhere"]
"""Where half of a backward may go: to the next processor of the line, or to any."""

HALVINGS: Final = 100
"""Of the interval in which the slowest processor's time lies: more than a float has digits."""

SLIVER: Final = 1e-9
"""Share of a processor's time below which room is none: rounding must not cut an I."""


class Layer(NamedTuple):
    """Seconds of a layer for one micro-batch; 0 for a half that it does not have."""

    forward_s: float
    input_s: float
    weight_s: float


class Placed(NamedTuple):
    """The processors of a layer.

    Args:
        forward, weight: of F and of W.
        inputs: (processor, share of I) in the order of the line; the shares add up to 1. Empty where there is no I.
    """

    forward: int
    weight: int
    inputs: tuple[tuple[int, float], ...]


def dealt(layers: Sequence[Layer], num_processors: int, intra: Intra, *, divide: bool = True) -> list[Placed]:
    """Each layer's processors, so that the slowest processor is fast.

    Args:
        divide: whether other processors may have parts of an I; else it is where its F is.
        intra: `neighbour`: intervals of the line, exact; `anywhere`: F, I and W whole on any processor, longest first, each to the
            processor that has least to do yet (Graham 1969: at most 4/3 - 1/(3p) of the best for p processors).
    """
    if not divide:
        # Side by side on the line: as one piece of work, which only F's processor can have.
        joined = [Layer(layer.input_s + layer.forward_s, 0.0, layer.weight_s) for layer in layers]
        found = dealt(joined, num_processors, intra)
        own = [((where.forward, 1.0),) if layer.input_s else () for layer, where in zip(layers, found, strict=True)]
        return [where._replace(inputs=inputs) for where, inputs in zip(found, own, strict=True)]
    return _longest_first(layers, num_processors) if intra == "anywhere" else _intervals(layers, num_processors)


def loads(layers: Sequence[Layer], placed: Sequence[Placed], num_processors: int) -> list[float]:
    """Seconds of every processor for one micro-batch of each layer."""
    out = [0.0] * num_processors
    for layer, where in zip(layers, placed, strict=True):
        out[where.forward] += layer.forward_s
        out[where.weight] += layer.weight_s
        for processor, share in where.inputs:
            out[processor] += share * layer.input_s
    return out


def _intervals(layers: Sequence[Layer], num_processors: int) -> list[Placed]:
    """The line in intervals whose longest is shortest.

    If a time does for the slowest processor, filling every processor up to it from the left takes the fewest processors. So the
    interval in which the least time lies is halved until it is as short as rounding.
    """
    total = sum(map(sum, layers))
    longest = max(max(layer.forward_s, layer.weight_s) for layer in layers)
    low, high = max(total / num_processors, longest), total
    best = _filled(layers, num_processors, low)
    if best is not None:
        return best
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _filled(layers, num_processors, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    # One processor can do all of it in `total`, so that is what is left where no halving did.
    return best or [Placed(0, 0, ((0, 1.0),) if layer.input_s else ()) for layer in layers]


def _filled(layers: Sequence[Layer], num_processors: int, limit_s: float) -> list[Placed] | None:
    """The line dealt out from the left, no processor above a limit; None if there are too few processors."""
    at, room, least = 0, limit_s, SLIVER * limit_s
    out = list[Placed]()

    def whole(seconds: float) -> int:
        nonlocal at, room
        if seconds > room + least:
            at, room = at + 1, limit_s
        room -= seconds
        return at

    for layer in layers:
        parts, left = list[tuple[int, float]](), layer.input_s
        while left > 0.0 and at < num_processors:
            if room <= least:
                at, room = at + 1, limit_s
            took = left if left <= room + least else room
            parts.append((at, took / layer.input_s))
            left, room = left - took, room - took
        forward = whole(layer.forward_s)
        # Without gradients of weights there is nothing to send elsewhere.
        out.append(Placed(forward, whole(layer.weight_s) if layer.weight_s else forward, tuple(parts)))
        if at >= num_processors:
            return None
    return out


def _longest_first(layers: Sequence[Layer], num_processors: int) -> list[Placed]:
    tasks = sorted((-seconds, number, half) for number, layer in enumerate(layers) for half, seconds in enumerate(layer))
    busy, where = [0.0] * num_processors, dict[tuple[int, int], int]()
    for less, number, half in tasks:
        processor = min(range(num_processors), key=lambda p: busy[p])
        busy[processor] -= less
        where[number, half] = processor
    return [
        Placed(
            forward := where[number, 0],
            where[number, 2] if layer.weight_s else forward,
            ((where[number, 1], 1.0),) if layer.input_s else (),
        )
        for number, layer in enumerate(layers)
    ]
