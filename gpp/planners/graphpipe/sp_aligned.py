"""All partitions that the graph planner may consider, for graphs small enough to list them.

A partition of a set of operators is aligned with its series-parallel structure when it is one stage,
or when the set splits in two so that both halves' partitions are aligned. The splits:

* series: between two neighbouring pieces;
* absorb-join: the tail of one branch, or several whole branches, go with what follows their join;
* absorb-fork: the head of one branch, or several whole branches, go with what precedes their fork;
* parallel: branches against the other branches.

Cutting inside a branch and joining that part with a part of another branch is not among them: this is
what separates GraphPipe's space from all convex partitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpp.graph.series_parallel import Order

Partition = frozenset[int]


class TooMany(Exception):
    """The list would be longer than the caller wants."""


def partitions(order: Order, mask: int, most: int) -> list[Partition]:
    """All aligned partitions of a set, in a fixed order.

    Args:
        most: partitions of the set and of any of its parts.

    Raises:
        TooMany: there are more.
    """
    memo: dict[int, list[Partition]] = {}
    work = 0

    def of(part: int) -> list[Partition]:
        nonlocal work
        if part not in memo:
            found = {frozenset((part,)): None}
            for first, second in splits(order, part):
                for a, b in itertools.product(of(first), of(second)):
                    found[a | b] = None
                    work += 1
                    if len(found) > most or work > 20 * most:
                        raise TooMany
            memo[part] = list(found)
        return memo[part]

    return of(mask)


def splits(order: Order, mask: int) -> Iterator[tuple[int, int]]:
    """The ways to split a set in two; see the module's docstring."""
    branches = order.components(mask)
    if len(branches) > 1:
        for chosen in _subsets(branches[1:]):
            yield mask & ~chosen, chosen
        return
    items = order.series_items(mask)
    before = 0
    for item in items:
        after = mask & ~before & ~item
        if after:
            yield before | item, after
            for tail in _ends(order, item, last=True):
                yield before | (item & ~tail), tail | after
        if before:
            for head in _ends(order, item, last=False):
                yield before | head, (item & ~head) | after
        before |= item


def _ends(order: Order, item: int, last: bool) -> Iterator[int]:
    branches = order.components(item)
    if len(branches) < 2:
        return
    for branch in branches:
        end = 0
        pieces = order.series_items(branch)
        for piece in reversed(pieces) if last else pieces:
            end |= piece
            yield end
    for chosen in _subsets(branches):
        if chosen != item and chosen not in branches:
            yield chosen


def _subsets(branches: tuple[int, ...]) -> Iterator[int]:
    """Unions of the non-empty subsets."""
    for size in range(1, len(branches) + 1):
        for chosen in itertools.combinations(branches, size):
            yield sum(chosen)
