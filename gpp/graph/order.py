"""Kahn's topological order, and names that nothing has yet."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def kahn(successors: Sequence[Collection[int]], key: Sequence[int]) -> list[int]:
    """Nodes in a topological order, among the ready ones the one with the smallest `key` first.

    Nodes on a cycle, and behind one, are left out.
    """
    missing = [0] * len(successors)
    for nexts in successors:
        for q in nexts:
            missing[q] += 1
    ready = [(key[p], p) for p, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    out = []
    while ready:
        _, p = heapq.heappop(ready)
        out.append(p)
        for q in successors[p]:
            missing[q] -= 1
            if not missing[q]:
                heapq.heappush(ready, (key[q], q))
    return out


def fresh_name(wish: str, taken: set[str], mark: str = "_") -> str:
    """A name that nothing has yet, which is added to `taken`: the wish itself, or with `mark` and the next number behind it."""
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}{mark}{number}"
    taken.add(name)
    return name
