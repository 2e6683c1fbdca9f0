"""A new plan while a model serves: when one is due, and on which devices.

A device is off its time where its passes, on the mean of a window, take longer against the plan than those of the device that
keeps it best: what all of them lose alike is no reason for another cut. A device that is lost, or off its time, leaves the requests
that are not answered yet to a plan for the devices that are left, at the speeds that they have shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
        slower: share by which the mean of a window may be above the plan's time.
        window: requests over whose passes a device is measured.
    """

    most: Natural = 0
    slower: Positive = 0.2
    window: Count = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A plan that was replaced.

    Args:
        request: the first one under the new plan, from 1 on.
        lost: devices that are no more; slow: how many times as long others took as the plan said, against the best. By the numbers
            of the cluster that the run began with.
        reason: what happened to a lost one.
        stages: of the new plan; devices: those that are left.
    """

    request: int
    lost: tuple[int, ...]
    slow: dict[int, float]
    reason: str
    stages: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        what = [f"device {device} is lost ({self.reason})" for device in self.lost]
        what += [f"device {device} takes {factor:.2f} times as long as planned" for device, factor in sorted(self.slow.items())]
        left = ", ".join(map(str, self.devices))
        return f"{'; '.join(what)}; from request {self.request} on another plan runs, with {self.stages} stages on devices {left}"


@final
class Pace:
    """Seconds of the passes of every device against the plan's.

    Args:
        planned_s: device -> seconds of a pass, above 0.
    """

    def __init__(self, planned_s: Mapping[int, float], settings: Replan) -> None:
        self.planned_s, self.settings = planned_s, settings
        self._seen: dict[int, deque[float]] = {device: deque(maxlen=settings.window) for device in planned_s}

    def note(self, device: int, seconds: float) -> None:
        """A pass is over."""
        self._seen[device].append(seconds)

    def factors(self) -> dict[int, float]:
        """How many times as long as planned every device takes, of what the best one does; empty until all have a whole window."""
        if any(len(seen) < self.settings.window for seen in self._seen.values()):
            return {}
        found = {device: sum(seen) / len(seen) / self.planned_s[device] for device, seen in self._seen.items()}
        best = min(found.values())
        return {device: factor / best for device, factor in found.items()}

    def off(self) -> dict[int, float]:
        """Those of the devices that are off their time."""
        return {device: factor for device, factor in self.factors().items() if factor > 1.0 + self.settings.slower}

    def expect(self, factors: Mapping[int, float]) -> None:
        """Take what was measured for the plan's times, and measure anew."""
        self.planned_s = {device: seconds * factors.get(device, 1.0) for device, seconds in self.planned_s.items()}
        for seen in self._seen.values():
            seen.clear()


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
