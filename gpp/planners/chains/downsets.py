"""The places where a graph can be cut in two, and every stage between two cuts.

A *state* is a set of operators that is closed under successors: what is left of the model behind a cut. A chain of stages is a
chain of nested states, from the whole graph down to nothing, and a stage is the difference of two of them. Cuts of one linear
order are n + 1 states; those of the graph itself are as many as it has downsets, which grow exponentially with branches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from gpp.errors import Infeasible
from gpp.graph.op_graph import OpGraph, bits

WORD = 64
PAIR_BYTES = 64
"""Of tables for each pair of nested states, roughly."""


class Budget:
    """Time and memory that a search may use.

    Args:
        planner: whose settings they are, for the message.
    """

    def __init__(self, planner: str, time_limit_s: float, memory_limit_bytes: float) -> None:
        self.planner, self.time_limit_s, self.memory_limit_bytes = planner, time_limit_s, memory_limit_bytes
        self._end = time.perf_counter() + time_limit_s

    def check(self) -> None:
        """Raises: Infeasible: the time is over."""
        if time.perf_counter() > self._end:
            raise Infeasible(
                f"{self.planner} did not end within its time limit of {self.time_limit_s:g} s",
                "raise strategy.planner.time_limit_s, or let it cut one linear order of the operators",
            )

    def hold(self, num_bytes: float, what: str) -> None:
        """Raises: Infeasible: `num_bytes` of tables are more than allowed."""
        if num_bytes > self.memory_limit_bytes:
            raise Infeasible(
                f"{self.planner} needs {num_bytes:.3g} bytes for {what}, its memory limit is {self.memory_limit_bytes:.3g}",
                "raise strategy.planner.memory_limit_bytes, or let it cut one linear order of the operators",
            )


def all_states(graph: OpGraph, limit: int, budget: Budget) -> list[int] | None:
    """Masks of all states, the empty one first; None if there are more than `limit`.

    Example: a chain of n operators has n + 1, two chains of n between a fork and a join (n + 1)^2 + 2.
    """
    found, layer = {0: None}, [0]
    successors = graph.successors
    ready_after: list[list[int]] = [list(bits(mask)) for mask in graph.predecessors]
    sinks = [op for op in range(graph.num_ops) if not successors[op]]
    frontier: dict[int, tuple[int, ...]] = {0: tuple(sinks)}
    while layer:
        budget.check()
        nexts: dict[int, tuple[int, ...]] = {}
        for mask in layer:
            candidates = frontier[mask]
            for op in candidates:
                new = mask | 1 << op
                if new in nexts:
                    continue
                added = [p for p in ready_after[op] if not successors[p] & ~new]
                nexts[new] = tuple(c for c in candidates if c != op) + tuple(added)
        found.update(dict.fromkeys(nexts))
        if len(found) > limit:
            return None
        layer, frontier = list(nexts), nexts
    return list(found)


def linear_states(order: Sequence[int]) -> list[int]:
    """Masks of the states of one linear order, the empty one first."""
    masks = [0]
    for op in reversed(order):
        masks.append(masks[-1] | 1 << op)
    return masks


class StateFamily:
    """States by ascending weight, and all pairs of nested ones.

    Args:
        weights: of the operators; orders the states, so that states of about equal weight are neighbours.

    Attributes:
        masks: of the states, ascending; the first is empty, the last is everything.
        start, end: [num_pairs] states before and behind a stage, sorted by start.
    """

    def __init__(self, graph: OpGraph, masks: Sequence[int], weights: np.ndarray, budget: Budget) -> None:
        self.graph = graph
        n = graph.num_ops
        totals = {mask: sum(float(weights[op]) for op in bits(mask)) for mask in masks} if len(masks) > n + 1 else {}
        self.masks = sorted(masks, key=lambda mask: (totals.get(mask, 0.0), mask.bit_count(), mask))
        self.num_states = len(self.masks)
        num_words = -(-n // WORD)
        self.words = np.array(
            [[mask >> WORD * w & (1 << WORD) - 1 for w in range(num_words)] for mask in self.masks], dtype=np.uint64
        ).reshape(self.num_states, num_words)
        raw = self.words.view(np.uint8).reshape(self.num_states, -1)
        self.members = np.unpackbits(raw, axis=1, bitorder="little")[:, :n].astype(float)
        self.start, self.end = self._pairs(budget)

    def _pairs(self, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
        if self.num_states == self.graph.num_ops + 1 and all(not a & ~b for a, b in zip(self.masks, self.masks[1:], strict=False)):
            start, end = np.tril_indices(self.num_states, -1)
            return start, end
        words = self.words
        ends: list[np.ndarray] = []
        count = 0
        for i in range(self.num_states):
            outside = ~words[i]
            nested = ~((words[:i] & outside).any(axis=1))
            ends.append(np.flatnonzero(nested).astype(np.int32))
            count += len(ends[-1])
            if not i % 256:
                budget.check()
                budget.hold(count * PAIR_BYTES, "its pairs of nested states")
        return np.repeat(np.arange(self.num_states, dtype=np.int32), [len(e) for e in ends]), np.concatenate(ends)

    @property
    def num_pairs(self) -> int:
        return len(self.start)

    def stages(self, pairs: np.ndarray) -> Stages:
        """The stages of some pairs, by their indices."""
        return Stages(self, self.start[pairs], self.end[pairs])

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[num_states] sums of a value over each state's operators."""
        return self.members @ values


class Stages:
    """Amounts of the stages between pairs of states."""

    def __init__(self, family: StateFamily, start: np.ndarray, end: np.ndarray) -> None:
        self.family, self.start, self.end = family, start, end

    @cached_property
    def words(self) -> np.ndarray:
        """[num_stages, num_words] masks."""
        return self.family.words[self.start] & ~self.family.words[self.end]

    def total(self, values: np.ndarray) -> np.ndarray:
        """[num_stages] sums of a value over each stage's operators."""
        sums = self.family.sums(values)
        return np.maximum(sums[self.start] - sums[self.end], 0.0)

    def members(self) -> np.ndarray:
        """[num_stages, num_ops] whether a stage holds an operator."""
        return (self.family.members[self.start] - self.family.members[self.end]).astype(bool)

    def holds(self, op: int) -> np.ndarray:
        """[num_stages] whether a stage holds an operator."""
        return (self.words[:, op // WORD] >> np.uint64(op % WORD) & np.uint64(1)).astype(bool)
