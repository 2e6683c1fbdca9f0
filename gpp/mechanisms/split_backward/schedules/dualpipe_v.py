"""DualPipeV: DeepSeek-V3's DualPipe (DeepSeek-AI, 2024) cut in half, with one copy of the weights (Qi et al.; DeepSeek, 2025).

A forward of one stage of a device stands beside a whole backward of its other stage, so that the messages of each can hide behind
the other. Backwards are in two halves right behind each other; only at the ends of the pipeline weight gradients are put off. Ours
runs the two one after the other: what a device could gain from running both at once is not in it.
"""

from __future__ import annotations

from typing import ClassVar, final

from gpp.mechanisms.split_backward.schedules.v import AHEAD, AbstractV, VDevice, Writer
from gpp.program.program import Task
from gpp.settings import settings


@final
@settings("strategy.schedule")
class DualPipeV(AbstractV):
    """The published order alone: for plans that pair up to a V, and two micro-batches for each device of it."""

    share: ClassVar[float] = 0.0

    def published(self, place: VDevice) -> list[Task] | None:
        far, near, rank, line, count = place
        # Devices are counted from the one with the source and the sink.
        before, own = rank, line - rank - 1
        if count < 2 * line:
            return None
        write = Writer(place)
        for _ in range(2 * own):
            write.add(AHEAD, far)
        for _ in range(before + 1):
            write.add(AHEAD, far)
            write.add(AHEAD, near)
        for _ in range(own):
            write.backward(near)
            write.add(AHEAD, near)
        for _ in range(count - 2 * line + before + 1):
            write.add(AHEAD, far)
            write.backward(near)
            write.add(AHEAD, near)
            write.backward(far)
        for _ in range(own):
            write.backward(near)
            write.add(AHEAD, near)
            write.backward(far)
        later = False
        for i in range(before + 1):
            half = i == (before + 1) // 2
            later = later or (half and before % 2 == 1)
            write.backward(near, later=later)
            later = later or half
            write.backward(far, later=later)
        for _ in range(own):
            write.put_off()
            write.backward(far, later=True)
        while write.waiting:
            write.put_off()
        return write.out
