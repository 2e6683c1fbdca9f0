"""Bytes of devices that hold several stages, of which one computes at a time: compiled (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import reals

NOTHING: Final = float("-inf")
"""Bytes of no stage."""


class Together:
    """Adds up the bytes of the stages of each of some devices."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.stays, self.passes = reals(num_devices), reals(num_devices)
        self.clear()

    def clear(self) -> None:
        """Take all stages away."""
        for d in range(self.num_devices):
            self.stays[d] = 0.0
            self.passes[d] = NOTHING

    def add(self, device: int, need: float, passing: float) -> None:
        """Put a stage on a device: its most bytes, and of these `gpp.cost.amounts.StageBytes.passing`."""
        self.stays[device] += need - passing
        if passing > self.passes[device]:
            self.passes[device] = passing

    def most(self, device: int) -> float:
        """Most bytes of a device at a time; minus infinity for one without a stage."""
        return self.stays[device] + self.passes[device]


def together(needs):
    """Most bytes of the stages of one device.

    Args:
        needs: for each stage its most bytes, and of these `gpp.cost.amounts.StageBytes.passing`.

    >>> together([(10.0, 4.0), (20.0, 3.0)])
    27.0
    """
    added = Together(1)
    for need, passing in needs:
        added.add(0, need, passing)
    return added.most(0)
