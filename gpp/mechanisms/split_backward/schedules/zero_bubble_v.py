"""ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", 2024): no bubble where all passes take as long, in the memory of 1F1B.

Each device runs 2 (P - r) - 1 forwards of its first stage, P devices in the line and r of them between it and the sink; then it
fills up with forwards of both, and from then on runs a forward and both halves of a backward of one stage and of the other in
turn. Weight gradients are put off only while the pipeline drains.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.split_backward.schedules.v import AHEAD, BACK, LATE, AbstractV, VDevice, Writer
from gpp.program.program import Task
from gpp.settings import settings


@final
@settings("strategy.schedule")
class ZeroBubbleV(AbstractV):
    """As much as 1F1B holds on its first device, on every device."""

    share: ClassVar[float] = 1.0

    def published(self, place: VDevice) -> list[Task] | None:
        far, near, rank, line, count = place
        if count < 2 * line:
            return None
        write = Writer(place)
        for _ in range(2 * (line - rank) - 1):
            write.add(AHEAD, far)
        for _ in range(rank):
            write.add(AHEAD, near)
            write.add(AHEAD, far)
        for _ in range(line - rank):
            write.add(AHEAD, near)
            write.backward(near)
        while write.left(AHEAD, near):
            write.add(AHEAD, far)
            write.backward(far)
            write.add(AHEAD, near)
            write.backward(near)
        for _ in range(rank):
            write.add(BACK, far)
            write.add(BACK, near)
        for _ in range(line - rank):
            write.add(BACK, far)
            write.add(LATE, far)
        for stage in (near, far):
            while write.left(LATE, stage):
                write.add(LATE, stage)
        return write.out
