"""Orders of split backwards, walked event by event: when steps end that are repeated without a pause, and what is held.

Nothing of the project's programs, waits or simulator is in it: messages take no time, and each stage has a device of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from tests.oracle.passes import ends_of

Pass = tuple[str, int]
"""`F`, `I` or `W`, and a micro-batch."""


def step_ends(
    orders: Mapping[int, Sequence[Pass]], edges: Sequence[tuple[int, int]], seconds: Mapping[str, int | Fraction], steps: int
) -> list[Fraction]:
    """When the last stage to do so has ended each step, if every stage begins its next one as soon as its own last is over."""
    lists = [[(step, s, kind, m) for step in range(steps) for kind, m in order] for s, order in orders.items()]

    def needs(task: tuple[int, int, str, int]) -> list[tuple[tuple[int, int, str, int], int]]:
        step, s, kind, m = task
        before = {
            "F": [(a, "F") for a, b in edges if b == s],
            "I": [(s, "F"), *((b, "I") for a, b in edges if a == s)],
            "W": [(s, "I")],
        }[kind]
        return [((step, other, what, m), 0) for other, what in before]

    ends = ends_of(lists, needs, lambda task: Fraction(seconds[task[2]]))
    assert ends is not None, "stages wait for each other"
    return [max(end for (at, *_), end in ends.items() if at == step) for step in range(steps)]


def most_held(order: Sequence[Pass], full: Fraction, late: Fraction) -> Fraction:
    """The most that is held, if a micro-batch takes so much until its I, and so much from there to its W."""
    most = now = Fraction(0)
    for kind, _ in order:
        now += {"F": full, "I": late - full, "W": -late}[kind]
        most = max(most, now)
    return most
