"""Plans of one model over a grid of settings: devices, micro-batches, memory, schedules, strategies.

For every choice of the others a strategy plans with all the memory first, and then with less and less. A plan that still fits is
taken over: whatever is better within less memory would be better with more. So most points of the grid take no search.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, starmap
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gpp import mechanism
from gpp.analysis.comparison import Attempt, attempt
from gpp.cluster import Cluster
from gpp.cost.problem import Problem, divisors
from gpp.errors import Infeasible, InvalidConfig, InvalidPlan
from gpp.planners.base import AbstractPlanner
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import Count, Share, settings
from gpp.strategy import Strategy

DIGITS = 3
"""Of a memory limit, rounded up."""


def _schedules() -> dict[str, AbstractSchedule]:
    added = mechanism.found("schedules", "EXPLORED", dict)
    return {"1f1b": OneFOneB(), "gpipe": GPipe(), **{name: each for own in added.values() for name, each in own.items()}}


@settings("explore")
class Grid:
    """The settings that a page to explore offers.

    Args:
        devices: numbers of devices, those above the cluster's left out: the first ones of the cluster.
        microbatches: numbers of micro-batches of a mini-batch, those left out that do not divide it.
        memory: memory limits as shares of the way from 0, what the leanest of all plans takes, to 1, what the hungriest takes; the
            way is one of ratios, as 1, 2, 4 bytes.
        schedules: by the names that the page has for them; each takes the place of every strategy's own.
    """

    devices: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8)
    microbatches: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16, 32)
    memory: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0, 0.25, 0.5, 0.75, 1.0)
    schedules: Annotated[dict[str, AbstractSchedule], Field(min_length=1)] = field(default_factory=_schedules)

    def devices_of(self, cluster: Cluster) -> tuple[int, ...]:
        """The numbers of devices that the cluster has, ascending.

        Raises:
            InvalidConfig: all are above the cluster's.
        """
        found = tuple(sorted({count for count in self.devices if count <= cluster.num_devices}))
        if not found:
            rule = f"are all above the {cluster.num_devices} devices of cluster={cluster.name}"
            raise InvalidConfig("explore.devices", list(self.devices), rule, f"set explore.devices=[{cluster.num_devices}]")
        return found

    def sizes_of(self, problem: Problem) -> tuple[int, ...]:
        """Micro-batch sizes, ascending: the imposed one, or those of the numbers of micro-batches.

        Raises:
            InvalidConfig: no number of micro-batches divides the mini-batch.
        """
        if problem.microbatch_size is not None:
            return (problem.microbatch_size,)
        whole = problem.minibatch_size
        found = tuple(sorted({whole // count for count in self.microbatches if whole % count == 0}))
        if not found:
            rule = f"must divide minibatch_size={whole}"
            raise InvalidConfig(
                "explore.microbatches", list(self.microbatches), rule, f"use some of {divisors(whole)[:8]}, or another mini-batch"
            )
        return found

    def scheduled(self, strategies: Sequence[Strategy]) -> dict[tuple[str, str], Strategy]:
        """(strategy, schedule) -> the strategy with that schedule in place of its own.

        Raises:
            InvalidConfig: a strategy's weights do not go with a schedule; names both.
        """
        found = dict[tuple[str, str], Strategy]()
        for strategy, (name, schedule) in product(strategies, self.schedules.items()):
            try:
                found[strategy.name, name] = replace(strategy, schedule=schedule)
            except InvalidConfig as error:
                rule = f"is planned with every schedule of explore.schedules, and {name} {error.rule}"
                raise InvalidConfig("strategies", strategy.name, rule, "leave it out, or plan it with mode=compare") from None
        return found


class GridPoint(NamedTuple):
    """A point of the grid.

    Args:
        memory: position in `Explored.limits`.
    """

    devices: int
    microbatch_size: int
    memory: int
    strategy: str
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The findings at every point of the grid.

    Args:
        limits: bytes of memory of a device, ascending.
        meanings: of strategies and schedules, by their names.
        points: an attempt for every combination. One object stands at several points where one plan fits several limits.
    """

    minibatch_size: int
    devices: tuple[int, ...]
    sizes: tuple[int, ...]
    limits: tuple[float, ...]
    strategies: tuple[str, ...]
    schedules: tuple[str, ...]
    meanings: Mapping[str, str]
    points: Mapping[GridPoint, Attempt]

    @property
    def settings(self) -> Iterator[GridPoint]:
        """All settings, the last field changing fastest."""
        return starmap(GridPoint, product(*self._axes))

    @property
    def start(self) -> list[int]:
        """The position of each value of the fastest setting, on the most devices and with the most memory that have a plan."""

        def rank(setting: GridPoint) -> tuple[bool, int, int, float]:
            found = self.points[setting]
            return found.status == "ok", setting.devices, setting.memory, -found.iteration_s

        return [list(axis).index(value) for axis, value in zip(self._axes, max(self.settings, key=rank), strict=True)]

    @property
    def _axes(self) -> tuple[Sequence[Any], ...]:
        return self.devices, self.sizes, range(len(self.limits)), self.strategies, self.schedules

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt once, in the order of the points."""
        return tuple({id(found): found for found in self.points.values()}.values())

    @property
    def fastest(self) -> tuple[Attempt, ...]:
        """The fastest attempt of each strategy with each schedule on the most devices and with the most memory, named by both."""
        widest = [s for s in self.points if s.devices == self.devices[-1] and s.memory == len(self.limits) - 1]
        out = []
        for pair in product(self.strategies, self.schedules):
            own = [self.points[setting] for setting in widest if (setting.strategy, setting.schedule) == pair]
            out.append(replace(min(own, key=lambda found: found.iteration_s), strategy="-".join(pair)))
        return tuple(out)


def within(problem: Problem, memory_bytes: float) -> Problem:
    """The problem on devices of at most so much memory."""
    devices = tuple(replace(d, memory_bytes=min(d.memory_bytes, memory_bytes)) for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def peak_bytes(found: Attempt) -> float:
    """The most memory that a device takes under an attempt's plan; 0 without a plan."""
    return max(found.predicted.metrics.peak_memory_bytes.values(), default=0) if found.predicted else 0


def explore(
    grid: Grid,
    strategies: Sequence[Strategy],
    problem: Problem,
    first: Callable[[int], Cluster],
    trying: Callable[[str], None] = lambda words: None,
) -> Explored:
    """Plan and predict at every point of the grid.

    Args:
        problem: on the whole cluster; its devices and sizes are replaced.
        first: the cluster of the first so many devices.
        trying: called with words before each search.

    Raises:
        InvalidConfig: the grid has nothing for this cluster, this mini-batch or these strategies.
    """
    counts, sizes, chosen = grid.devices_of(problem.cluster), grid.sizes_of(problem), grid.scheduled(strategies)
    posed = {(n, b): replace(problem, cluster=first(n), microbatch_size=b) for n, b in product(counts, sizes)}
    wholes = list(product(posed, chosen))

    def say(what: str, number: int) -> None:
        (n, b), (who, schedule) = wholes[number]
        trying(f"{what}, {number + 1} of {len(wholes)}: {who}, {schedule}, {n} devices, micro-batch {b} ...")

    free: list[Attempt] = []
    for number, (size, who) in enumerate(wholes):
        say("all the memory", number)
        free.append(attempt(chosen[who], posed[size]))
    limits = _limits(grid, problem, [peak_bytes(found) for found in free if found.plan is not None])
    points: dict[GridPoint, Attempt] = {}
    for number, (size, who) in enumerate(wholes):
        say("less memory", number)
        for m, found in _descent(chosen[who], posed[size], free[number], limits):
            points[GridPoint(*size, m, *who)] = found
    return Explored(
        minibatch_size=problem.minibatch_size,
        devices=counts,
        sizes=sizes,
        limits=limits,
        strategies=tuple(strategy.name for strategy in strategies),
        schedules=tuple(grid.schedules),
        meanings={
            **{each.name: _meaning(each.planner) for each in strategies},
            **{n: _meaning(s) for n, s in grid.schedules.items()},
        },
        points=points,
    )


def _meaning(choice: AbstractPlanner | AbstractSchedule) -> str:
    """The first sentence of its class's own words; empty where it has none."""
    words = inspect.cleandoc(type(choice).__doc__ or "").partition("\n\n")[0]
    return " ".join(words.split())


def _limits(grid: Grid, problem: Problem, peaks: Sequence[float]) -> tuple[float, ...]:
    """The limits of the grid, ascending; the least memory of the cluster's devices where no plan fits that."""
    if not peaks:
        return (min(device.memory_bytes for device in problem.cluster.devices),)
    lean, hungry = min(peaks), max(peaks)
    return tuple(sorted({_rounded_up(lean * (hungry / lean) ** share) for share in grid.memory}))


def _rounded_up(amount: float) -> float:
    """The number, rounded up to `DIGITS` digits."""
    unit = 10.0 ** (math.floor(math.log10(amount)) + 1 - DIGITS)
    return math.ceil(amount / unit) * unit


def _descent(strategy: Strategy, problem: Problem, found: Attempt, limits: Sequence[float]) -> Iterator[tuple[int, Attempt]]:
    """(position of a limit, what is found within it), from the largest limit down.

    Args:
        found: with all the memory.
    """
    for m in reversed(range(len(limits))):
        narrow = within(problem, limits[m])
        found = _still(strategy, narrow, found) or attempt(strategy, narrow)
        yield m, found


def _still(strategy: Strategy, problem: Problem, found: Attempt) -> Attempt | None:
    """An attempt whose plan fits this problem, too; None where it does not, or has none."""
    if found.plan is None:
        return None
    try:
        strategy.check(found.plan, problem)
    except (Infeasible, InvalidPlan):
        return None
    # An order that depends on what devices hold may be another one within less memory.
    ordered = strategy.schedule.needs_bills
    return replace(found, predicted=strategy.predict(found.plan, problem)) if ordered else found
