"""Every order of the passes of tiny pipelines, by trying all of them. It shares nothing with the planner's code but plain
numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.oracle.passes import ends_of

REPEATS = 24
"""Steps after which the growth of the end is taken."""


@dataclass(frozen=True)
class Pipeline:
    """Stages on devices of their own, each with a forward, and two halves of a backward that are split.

    Args:
        edges: data goes along them.
        micro: micro-batches.
        seconds: of each stage: a forward, and both halves of a backward.
        message_s: of any message.
        held: of each stage: bytes of a micro-batch in full, and late.
        room: bytes of a device.
    """

    edges: tuple[tuple[int, int], ...]
    micro: int
    seconds: tuple[tuple[float, float, float], ...]
    message_s: float
    held: tuple[tuple[float, float], ...]
    room: float


def least(of: Pipeline) -> tuple[float, float]:
    """The shortest period and the earliest end over all orders."""
    each = [list(_own(of, stage)) for stage in range(len(of.seconds))]
    found = [_times(of, orders) for orders in itertools.product(*each)]
    return min(period for period, _ in found), min(end for _, end in found)


def _own(of: Pipeline, stage: int) -> Iterator[tuple[int, ...]]:
    """The orders of a stage that fit: a word of 0, 1 and 2, in which no letter has come more often than the one before it."""
    full, late = of.held[stage]
    for word in set(itertools.permutations([0, 1, 2] * of.micro)):
        count, fits = [0, 0, 0], True
        for letter in word:
            count[letter] += 1
            ordered = count[0] >= count[1] >= count[2]
            held = full * (count[0] - count[1]) + late * (count[1] - count[2])
            fits = fits and ordered and held <= of.room + 1e-9
        if fits:
            yield word


def _times(of: Pipeline, orders: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Growth of the end from step to step, and the end of the first one; infinite where stages wait for each other."""
    lists = [
        [(step, stage, letter, list(word[:at]).count(letter)) for step in range(REPEATS) for at, letter in enumerate(word)]
        for stage, word in enumerate(orders)
    ]

    def needs(task: tuple[int, int, int, int]) -> list[tuple[tuple[int, int, int, int], float]]:
        step, stage, letter, m = task
        if letter == 2:
            return [((step, stage, 1, m), 0.0)]
        if letter == 0:
            return [((step, a, 0, m), of.message_s) for a, b in of.edges if b == stage]
        return [((step, stage, 0, m), 0.0), *(((step, b, 1, m), of.message_s) for a, b in of.edges if a == stage)]

    found = ends_of(lists, needs, lambda task: of.seconds[task[1]][task[2]])
    if found is None:
        return float("inf"), float("inf")
    ends = [0.0] * REPEATS
    for (step, *_), end in found.items():
        ends[step] = max(ends[step], end)
    half = REPEATS // 2
    return (ends[-1] - ends[half - 1]) / (REPEATS - half), ends[0]


def earliest(edges: Sequence[tuple[int, int]], seconds: Sequence[tuple[float, float, float]], device_of: Sequence[int]) -> float:
    """The earliest end of one micro-batch over all orders of devices that may have several stages; messages take no time."""
    words = [
        list(
            itertools.permutations([(stage, letter) for stage, own in enumerate(device_of) if own == device for letter in range(3)])
        )
        for device in sorted({*device_of})
    ]

    def needs(task: tuple[int, int]) -> list[tuple[tuple[int, int], float]]:
        stage, letter = task
        before = [(stage, letter - 1)] if letter else []
        before += [(a, 0) for a, b in edges if b == stage and letter == 0]
        before += [(b, 1) for a, b in edges if a == stage and letter == 1]
        return [(each, 0.0) for each in before]

    every = (ends_of(orders, needs, lambda task: seconds[task[0]][task[1]]) for orders in itertools.product(*words))
    return min(max(ends.values()) for ends in every if ends is not None)
