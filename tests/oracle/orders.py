"""Every order of the passes of tiny pipelines, by trying all of them. It shares nothing with the planner's code but plain
numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    free, ends = [0.0] * len(orders), []
    for _ in range(REPEATS):
        done: dict[tuple[int, int, int], float] = {}
        place = [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for stage, word in enumerate(orders):
                while place[stage] < len(word):
                    letter = word[place[stage]]
                    m = list(word[: place[stage]]).count(letter)
                    if letter == 0:
                        needs = [((a, 0, m), of.message_s) for a, b in of.edges if b == stage]
                    elif letter == 1:
                        needs = [((b, 1, m), of.message_s) for a, b in of.edges if a == stage] + [((stage, 0, m), 0.0)]
                    else:
                        needs = [((stage, 1, m), 0.0)]
                    if any(need not in done for need, _ in needs):
                        break
                    start = max([free[stage], *(done[need] + wait for need, wait in needs)])
                    free[stage] = done[stage, letter, m] = start + of.seconds[stage][letter]
                    place[stage] += 1
                    moved = True
        if any(place[stage] < len(word) for stage, word in enumerate(orders)):
            return float("inf"), float("inf")
        ends.append(max(free))
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
    best = float("inf")
    for orders in itertools.product(*words):
        done: dict[tuple[int, int], float] = {}
        place, free, moved = [0] * len(orders), [0.0] * len(orders), True
        while moved:
            moved = False
            for device, word in enumerate(orders):
                while place[device] < len(word):
                    stage, letter = word[place[device]]
                    needs = [(stage, letter - 1)] if letter else []
                    needs += [(a, 0) for a, b in edges if b == stage and letter == 0]
                    needs += [(b, 1) for a, b in edges if a == stage and letter == 1]
                    if any(need not in done for need in needs):
                        break
                    start = max([free[device], *(done[need] for need in needs)])
                    free[device] = done[stage, letter] = start + seconds[stage][letter]
                    place[device] += 1
                    moved = True
        if all(at == len(word) for at, word in zip(place, orders, strict=True)):
            best = min(best, max(free))
    return best
