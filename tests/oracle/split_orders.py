"""Orders of split backwards, walked event by event: when steps end that are repeated without a pause, and what is held.

Nothing of the project's programs, waits or simulator is in it: messages take no time, and each stage has a device of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

Pass = tuple[str, int]
"""`F`, `I` or `W`, and a micro-batch."""


def step_ends(
    orders: Mapping[int, Sequence[Pass]], edges: Sequence[tuple[int, int]], seconds: Mapping[str, int | Fraction], steps: int
) -> list[Fraction]:
    """When the last stage to do so has ended each step, if every stage begins its next one as soon as its own last is over."""
    before = {s: [a for a, b in edges if b == s] for s in orders}
    behind = {s: [b for a, b in edges if a == s] for s in orders}
    todo = {s: [(step, kind, m) for step in range(steps) for kind, m in order] for s, order in orders.items()}
    done: dict[tuple[int, int, str, int], Fraction] = {}
    free = dict.fromkeys(orders, Fraction(0))
    place = dict.fromkeys(orders, 0)
    while any(place[s] < len(todo[s]) for s in orders):
        moved = False
        for s, own in todo.items():
            while place[s] < len(own):
                step, kind, m = own[place[s]]
                needs = {
                    "F": [(a, "F") for a in before[s]],
                    "I": [(s, "F"), *((b, "I") for b in behind[s])],
                    "W": [(s, "I")],
                }[kind]
                found = [done.get((step, other, what, m)) for other, what in needs]
                if any(end is None for end in found):
                    break
                start = max([free[s], *(end for end in found if end is not None)])
                free[s] = done[step, s, kind, m] = start + Fraction(seconds[kind])
                place[s], moved = place[s] + 1, True
        if not moved:
            raise AssertionError(f"blocked at {place}")
    last = [order[-1] for order in orders.values()]
    return [max(done[step, s, *what] for s, what in zip(orders, last, strict=True)) for step in range(steps)]


def most_held(order: Sequence[Pass], full: Fraction, late: Fraction) -> Fraction:
    """The most that is held, if a micro-batch takes so much until its I, and so much from there to its W."""
    most = now = Fraction(0)
    for kind, _ in order:
        now += {"F": full, "I": late - full, "W": -late}[kind]
        most = max(most, now)
    return most
