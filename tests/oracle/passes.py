"""Passes in lists, each after what it needs: when each ends. It shares nothing with the simulator but plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Task = TypeVar("Task", bound=Hashable)


def ends_of(
    lists: Collection[Sequence[Task]], needs: Callable[[Task], Iterable[tuple[Task, Any]]], took: Callable[[Task], Any]
) -> dict[Task, Any] | None:
    """When each task ends, if each list is run in order and each task as soon as it can; None if tasks wait for each other.

    Args:
        needs: tasks that have ended so many seconds before.
        took: seconds of a task.
    """
    ends: dict[Task, Any] = {}
    left, moved = [iter(own) for own in lists], True
    free, heads = [0] * len(lists), [next(own, None) for own in left]
    while moved:
        moved = False
        for n, own in enumerate(left):
            while (task := heads[n]) is not None:
                ready = [(ends.get(need), wait) for need, wait in needs(task)]
                if any(end is None for end, _ in ready):
                    break
                free[n] = ends[task] = max([free[n], *(end + wait for end, wait in ready)]) + took(task)
                heads[n], moved = next(own, None), True
    return ends if heads == [None] * len(heads) else None
