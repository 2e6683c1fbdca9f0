"""All boundaries of a plan at once: an exact dynamic program over the places where its line of operators may be cut.

The stages of a plan, one after the other, are a line of operators. A number of stages and a cost for each as a function of where
it begins and ends give the cheapest cuts. As a move of the local search, `all_boundaries` takes the sum of the eighth powers of
the stages' times, which is nearly the longest time, with an opinion on the others too.

Complexity: O(S W^2) for S stages and W places in a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gpp.graph.op_graph import bits, mask_of
from gpp.planners.common.linear_orders import Intervals
from gpp.planners.common.moves import Around, Point

WINDOW = 24
"""Operators by which a boundary may move to either side."""

POWER = 8.0
"""Exponent in the sum of stage times."""

LONGEST_LINE = 600
"""Operators up to which the tables of all intervals are worth their memory."""


def cheapest_cuts(places: Sequence[np.ndarray], costs: Sequence[np.ndarray]) -> list[int] | None:
    """The cuts of a line into a given number of stages with the least sum of costs; None if every cut costs infinity.

    Three stages of six operators, whose boundaries may move by one place (`.`: not allowed):

        seconds           3   2   1   4   1   1         time of a stage from ... to ...
        place           0   1   2   3   4   5   6
                                                        0 to 1 2 3    1 2 3 to 3 4 5    3 4 5 to 6
        stage 0 ends        x   x   x
        stage 1 ends                x   x   x                3 5 6    1:       3 7 8    3: 6
                                                                      2:       1 5 6    4: 2
        best            0       2       4       6                     3:       . 4 5    5: 1

    The sum of the times' eighth powers is least for the stages of 5, 5 and 2 seconds: `[0, 2, 4, 6]`.

    Args:
        places: [stages + 1] positions where each stage may begin, and where the last one may end.
        costs: [stages] of each stage that begins at places[s][i] and ends at places[s + 1][j]; infinite: not allowed.

    Returns:
        A position for every element of `places`; ties go to the first.

    >>> seconds = np.array([[3, 5, 6]]), np.array([[3, 7, 8], [1, 5, 6], [np.inf, 4, 5]]), np.array([[6], [2], [1]])
    >>> cheapest_cuts([np.array(p) for p in ([0], [1, 2, 3], [3, 4, 5], [6])], [s**8 for s in seconds])
    [0, 2, 4, 6]
    """
    value, choices = np.zeros(len(places[0])), []
    for cost in costs:
        total = value[:, None] + cost
        choices.append(total.argmin(axis=0))
        value = total.min(axis=0)
    at = int(value.argmin())
    if not np.isfinite(value[at]):
        return None
    cuts = [int(places[-1][at])]
    for where, choice in zip(reversed(places[:-1]), reversed(choices), strict=True):
        at = int(choice[at])
        cuts.append(int(where[at]))
    return cuts[::-1]


def all_boundaries(around: Around, point: Point) -> Iterator[Point]:
    """The point with all boundaries at their best places, on its own devices or on whichever are slowest and smallest."""
    line = tuple(op for mask, _ in point.parts for op in bits(mask))
    if len(point.parts) < 2 or len(line) > LONGEST_LINE:
        return
    ends = np.cumsum([mask.bit_count() for mask, _ in point.parts]).tolist()
    places = [np.arange(max(end - WINDOW, 1), min(end + WINDOW, len(line) - 1) + 1) for end in ends[:-1]]
    places = [np.array([0]), *places, np.array(ends[-1:])]
    cuts = cheapest_cuts(places, _costs(around, point, line, places))
    if cuts is not None and cuts[1:] != ends:
        masks = [mask_of(line[i:j]) for i, j in pairwise(cuts)]
        yield replace(point, parts=tuple((mask, count) for mask, (_, count) in zip(masks, point.parts, strict=True)))


def _costs(around: Around, point: Point, line: tuple[int, ...], places: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Costs of the stages of a point, by where they begin and end: eighth powers of their times, infinite without room."""
    assessor = around.assessor
    costs, b = assessor.costs, point.sizes[0]
    most = costs.problem.minibatch_size // b
    table, out, scale = Intervals(costs, line), [], 0.0
    for s, ((_, count), depth) in enumerate(zip(point.parts, assessor.depths(point.parts, chain=point.chain), strict=True)):
        i, j = places[s][:, None], places[s + 1][None, :]
        samples = b // count
        devices = point.devices[s] if point.devices is not None else None
        rates = assessor.cluster.wiring.mean_rates
        rate = min(rates[d] for d in devices) if devices else costs.link.bandwidth_bytes_per_s
        seconds = table.moved[i, j] * (samples / rate)
        for prefix in _prefixes(around, table, samples, devices):
            seconds = np.maximum(seconds, prefix[j] - prefix[i])
        seconds = seconds + costs.finish_array_s(table.trainable[i, j], count) / most
        need = table.held((i, j), samples).peak(costs.problem.regime.held(depth, most))
        have = min(assessor.cluster.devices[d].memory_bytes for d in devices) if devices else costs.limit_bytes
        scale = scale or float(seconds.max()) or 1.0
        out.append(np.where((need <= have * (1 + 1e-9)) & (j > i), (seconds / scale) ** POWER, np.inf))
    return out


def _prefixes(around: Around, table: Intervals, samples: int, devices: tuple[int, ...] | None) -> Iterator[np.ndarray]:
    """Seconds of the line up to each place, on every type of the devices; on the slowest devices if there are none yet."""
    problem, costs = around.assessor.problem, around.assessor.costs
    if devices is None:
        yield table.prefix_s[costs.row(samples)]
        return
    for device_type in sorted({problem.type_of_device[d] for d in devices}):
        times = problem.op_times(samples, device_type)
        yield np.concatenate([[0.0], np.cumsum((times.forward_s + times.backward_s)[list(table.order)])])
