"""V schedules that repeat a block of six passes (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).

Of every micro-batch, each device has a forward, and both halves of a backward, of two stages: six passes, one time slot each. All
that a schedule chooses is how many slots later the next stage of the pipeline has its pass: on the way down, up, and down and up
again with the gradients. Micro-batches come every six slots. The fewer slots between a micro-batch's forward and its backward, the
fewer micro-batches are held; and no two passes of a device may fall on one slot.
"""

from __future__ import annotations

from abc import ABC
from functools import cache
from typing import ClassVar, NamedTuple

from gpp.mechanisms.split_backward.schedules.v import AHEAD, BACK, LATE, AbstractV, VDevice
from gpp.program.program import Task

BLOCK = 6
"""Slots from one micro-batch to the next."""


class Steps(NamedTuple):
    """The slots from a pass to the same pass of the next stage.

    Args:
        down, up: slots of forwards, on the first and on the second half of the V.
        back_down, back_up: slots of the first halves of backwards, on the second and on the first half.
    """

    down: int
    up: int
    back_down: int
    back_up: int


Turns = tuple[int, int, int]
"""Slots between two of the four ways of the V, on the same device."""

Slot = tuple[str, int, int]
"""Kind, half of the V (0: the far one), and slot of the pass of micro-batch 0."""


class AbstractRepeating(AbstractV, ABC):
    """A block of passes, repeated."""

    steps: ClassVar[Steps]

    def published(self, place: VDevice) -> list[Task] | None:
        """Where both stages of a device would have passes in one slot, as on plans that do not pair up to a V, the nearer one goes
        first: every order by slots can run, since each pass has a later slot than those that it needs."""
        far, near, rank, line, count = place
        slots = slots_of(self.steps, turns_of(self.steps, line), line, rank)
        order = [(slot + BLOCK * m, -half, Task((far, near)[half], kind, m)) for kind, half, slot in slots for m in range(count)]
        return [task for *_, task in sorted(order)]


@cache
def turns_of(steps: Steps, line: int) -> Turns:
    """Slots between the last pass of each of the four ways of the V and the first of the next one, on the same device.

    Those with which no device has two passes in one slot; among them those with which devices hold least, then the shortest.
    """

    def rated(turns: Turns) -> tuple[bool, int, int]:
        clash, most = False, 0
        for rank in range(line):
            slots = slots_of(steps, turns, line, rank)
            clash |= len({slot % BLOCK for *_, slot in slots}) < BLOCK
            at = {(kind, half): slot for kind, half, slot in slots}
            # A micro-batch more for every block that begins before the last pass of this one is over.
            most = max(most, sum(-(-(at[LATE, half] - at[AHEAD, half]) // BLOCK) for half in (0, 1)))
        return clash, most, sum(turns)

    each = range(1, BLOCK + 1)
    return min(((a, b, c) for a in each for b in each for c in each), key=rated)


def slots_of(steps: Steps, turns: Turns, line: int, rank: int) -> list[Slot]:
    """The passes of a device.

    Args:
        rank: devices between this one and the one with the sink.
    """
    last = line - 1
    turn = steps.down * last + turns[0]
    sink = turn + steps.up * last + turns[1]
    bottom = sink + steps.back_down * last + turns[2]
    found: list[Slot] = [
        (AHEAD, 0, steps.down * rank),
        (AHEAD, 1, turn + steps.up * (last - rank)),
        (BACK, 1, sink + steps.back_down * rank),
        (BACK, 0, bottom + steps.back_up * (last - rank)),
    ]
    used = {slot % BLOCK for *_, slot in found}
    for half, after in ((1, found[2][2]), (0, found[3][2])):
        free = next(slot for slot in range(after + 1, after + BLOCK + 1) if slot % BLOCK not in used)
        used.add(free % BLOCK)
        found.append((LATE, half, free))
    return found
