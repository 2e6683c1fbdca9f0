"""Amounts of work on all weights of a stage, as declared and as counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightWork:
    """The work on all weights of a stage together.

    Args:
        moved: bytes read and written, for each byte of the weights.
        launches: calls that each go over the whole list of tensors; each has a fixed cost, however small the weights are.
    """

    moved: float = 0.0
    launches: float = 0.0

    def __add__(self, other: WeightWork) -> WeightWork:
        return WeightWork(self.moved + other.moved, self.launches + other.launches)

    def __mul__(self, times: float) -> WeightWork:
        return WeightWork(self.moved * times, self.launches * times)


NONE = WeightWork()
COPY = WeightWork(2.0, 1)
"""A copy reads and writes every byte."""
ADD = WeightWork(3.0, 1)
"""The sum of two lists of tensors: both are read, a third is written."""
