"""V schedules that repeat a block of six passes (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).

Of every micro-batch, each device has a forward, and both halves of a backward, of two stages: six passes, one time slot each. All that
a schedule chooses is how many slots later the next stage of the pipeline has its pass: on the way down, up, and down and up again with
the gradients. Micro-batches come every six slots. The fewer slots between a micro-batch's forward and its backward, the fewer
micro-batches are held; and no two passes of a device may fall on one slot.
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, NamedTuple

from gpp.program.program import Task
from gpp.schedules.v import AbstractV, F, I, Place, W

BLOCK = 6
"""Slots from one micro-batch to the next."""


class Steps(NamedTuple):
    """Slots from a pass to that of the next stage.

    Args:
        down, up: of forwards, on the first and on the second half of the V.
        back_down, back_up: of the first halves of backwards, on the second and on the first half.
        turns: from the last pass of each of the four ways to the first of the next one, on the same device.
    """

    down: int
    up: int
    back_down: int
    back_up: int
    turns: tuple[int, int, int]


class AbstractRepeating(AbstractV, ABC):
    """A block of passes, repeated."""

    steps: ClassVar[Steps]

    def published(self, place: Place) -> list[Task] | None:
        """Where both stages of a device would have passes in one slot, as on plans that do not pair up to a V, the nearer one goes
        first: every order by slots can run, since each pass has a later slot than those that it needs."""
        far, near, rank, line, count = place
        slots = slots_of(self.steps, line, rank)
        order = [(slot + BLOCK * m, -half, Task((far, near)[half], kind, m)) for kind, half, slot in slots for m in range(count)]
        return [task for *_, task in sorted(order)]


def slots_of(steps: Steps, line: int, rank: int) -> list[tuple[str, int, int]]:
    """Kind, half of the V (0 the far one) and slot of each pass of micro-batch 0 on a device.

    Args:
        rank: devices between this one and the one with the sink.
    """
    down, up, back_down, back_up, turns = steps
    last = line - 1
    turn = down * last + turns[0]
    sink = turn + up * last + turns[1]
    bottom = sink + back_down * last + turns[2]
    found = [
        (F, 0, down * rank),
        (F, 1, turn + up * (last - rank)),
        (I, 1, sink + back_down * rank),
        (I, 0, bottom + back_up * (last - rank)),
    ]
    used = {slot % BLOCK for _, _, slot in found}
    for half, after in ((1, found[2][2]), (0, found[3][2])):
        slot = after + 1
        while slot % BLOCK in used and len(used) < BLOCK:
            slot += 1
        used.add(slot % BLOCK)
        found.append((W, half, slot))
    return found
