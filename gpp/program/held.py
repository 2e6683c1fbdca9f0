"""The bytes that a device holds over its order of passes. Simulator, plan checks, emulator and reports take their peak here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

from gpp.cost.amounts import StageBytes
from gpp.cost.holding import Held
from gpp.cost.stage import StageCost
from gpp.program.kinds import COMPUTE, KINDS, Action
from gpp.program.program import Program, Task
from gpp.routing import new


@final
class Meter:
    """Follows the passes of one device, which computes one stage at a time.

    Args:
        keeping: the stages that have backwards. In others nothing is held beyond the forward.
    """

    def __init__(self, stages: Collection[int], keeping: Collection[int]) -> None:
        self._place = {s: i for i, s in enumerate(stages)}
        self._keeping = frozenset(keeping)
        self._now = [Held()] * len(self._place)
        self._several = len(self._place) > 1
        self._seen: set[tuple[int, tuple[Held, ...]]] = set()

    def take(self, kind: str, stage: int) -> None:
        """Note a pass. A forward's results count while it runs, and what a backward uses counts until it is over."""
        row, place, now = KINDS[kind], self._place[stage], self._now
        full, late = now[place]
        if row.holds:
            before, now[place] = now[place], new(Held, (full + 1, late))
            self._seen.add((place, tuple(now)))
            if stage not in self._keeping:
                now[place] = before
        else:
            if self._several:  # a single stage holds less than at the forward before
                self._seen.add((place, tuple(now)))
            split = row.returns - row.finishes
            now[place] = new(Held, (full - row.returns, late + split))
            if split > 0:
                self._seen.add((place, tuple(now)))

    def begin(self) -> None:
        """Forget everything that is held."""
        self._now = [Held()] * len(self._place)

    def peak_bytes(self, memories: Mapping[int, StageBytes]) -> float:
        """The most bytes that the device has held.

        Args:
            memories: stage -> its bytes.
        """
        own = [memories[s] for s in self._place]
        idle = [sum(other.passing for other in own[:place] + own[place + 1 :]) for place in range(len(own))]
        empty = (Held(),) * len(own)
        return max(
            sum(memory.peak(*held) for memory, held in zip(own, state, strict=True)) - idle[place]
            for place, state in (*self._seen, *((place, empty) for place in range(len(own))))
        )


def order_peak(order: Iterable[Task | Action], memories: Mapping[int, StageBytes]) -> float:
    """The most bytes that a device holds over an order of passes.

    Args:
        memories: stage of the device -> its bytes.

    >>> one = StageBytes(static=10.0, versions=0.0, microbatch=3.0, transient=0.0)
    >>> order_peak([Task(0, "F", 0), Task(0, "F", 1), Task(0, "B", 0)], {0: one})
    16.0
    """
    tasks = list(order)
    meter = Meter(sorted(memories), {task.stage for task in tasks if KINDS[task.kind].returns})
    for task in tasks:
        meter.take(task.kind, task.stage)
    return meter.peak_bytes(memories)


def device_peaks(program: Program, bills: Sequence[StageCost]) -> dict[int, float]:
    """Device -> the most bytes that it holds, over all of a program.

    Args:
        bills: the bill of every stage.
    """
    out = {}
    for device, actions in program.actions.items():
        order = [action for action in actions if action.kind in COMPUTE]
        out[device] = order_peak(order, {s: bills[s].memory for s in {task.stage for task in order}})
    return out
