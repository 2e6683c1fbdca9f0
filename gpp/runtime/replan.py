"""A new plan while a model serves: when one is due, and on which devices.

A stage is off its time when its passes have taken another time than the plan says, on the mean of a window. A device that is lost,
or off its time, leaves the requests that are not answered yet to a plan for the devices that are left, at the speeds that they
have shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import final

from gpp.cluster import Cluster
from gpp.errors import InvalidConfig
from gpp.settings import Count, Natural, Positive, settings


@final
@settings("engine.replan")
class Replan:
    """When a plan is replaced while it serves.

    Args:
        most: new plans in a run; 0: a lost device ends the run, and a slow one is left as it is.
        off: share by which the mean of a window may be off the plan's time.
        window: passes of a stage that are measured at a time.
    """

    most: Natural = 0
    off: Positive = 0.2
    window: Count = 32


@final
class Pace:
    """Seconds of the passes of every device against the plan's.

    Args:
        planned_s: device -> seconds of a pass.
    """

    def __init__(self, planned_s: Mapping[int, float], settings: Replan) -> None:
        self.planned_s, self.settings = planned_s, settings
        self._seen: dict[int, deque[float]] = {device: deque(maxlen=settings.window) for device in planned_s}

    def note(self, device: int, seconds: float) -> None:
        """A pass is over."""
        self._seen[device].append(seconds)

    def factors(self) -> dict[int, float]:
        """Measured over planned seconds, of each device with a whole window."""
        return {
            device: sum(seen) / len(seen) / self.planned_s[device]
            for device, seen in self._seen.items()
            if len(seen) == self.settings.window and self.planned_s[device] > 0
        }

    def off(self) -> dict[int, float]:
        """Those of the devices that are off their time."""
        return {device: factor for device, factor in self.factors().items() if abs(factor - 1.0) > self.settings.off}


def at_speeds(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    """The cluster with devices that take so many times as long."""
    devices = tuple(
        replace(device, speed_factor=device.speed_factor / factors.get(number, 1.0))
        for number, device in enumerate(cluster.devices)
    )
    return replace(cluster, devices=devices)


def without(cluster: Cluster, lost: Collection[int]) -> tuple[Cluster, tuple[int, ...]]:
    """The cluster without some devices, and the old number of each that is left; links of their own go with their devices.

    Raises:
        InvalidConfig: no device is left.
    """
    kept = tuple(device for device in range(cluster.num_devices) if device not in lost)
    if not kept:
        raise InvalidConfig("cluster.num_devices", cluster.num_devices, "every device is lost", "start again with more devices")
    number = {device: i for i, device in enumerate(kept)}
    links = []
    for pair in cluster.links:
        if pair.numbers is None:
            if all(any(cluster.devices[d].name == name for d in kept) for name in pair.between):
                links.append(pair)
        elif all(device in number for device in pair.numbers):
            a, b = pair.numbers
            links.append(replace(pair, between=(number[a], number[b])))
    left = replace(
        cluster,
        devices=tuple(cluster.devices[d] for d in kept),
        nodes=tuple(cluster.nodes[d] for d in kept),
        links=tuple(links),
    )
    return left, kept
