"""A new plan while a run goes on: when one is due, for which devices, and what is said of it.

The controller looks at the seconds of every device's passes. A device is off its time where they take longer against the plan than
those of the device that keeps it best: what all of them lose alike is no reason for another cut. Both halves of a window must say
so, and alike, by their means: what is over soon, as a collection or another program's short work, is in one of them only, and what
has just begun is not yet in both. The newer half says how slow. A plan for the devices at the speeds that they have shown is made
then, and taken if it pays.

A switch does not change how fast a device is. So what a device takes in the first window after it is what its operators take there:
were that taken for its speed, operators that are priced too low would be sent from device to device.

A training moves layers between its workers (`gpp.runtime.worker.takeover`), which stay. A run that trains nothing ends its workers
and begins new ones, and may lose devices, too: what it computes with does not change (`gpp.app.replanning`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import final

from gpp.cluster import Cluster
from gpp.errors import InvalidConfig
from gpp.settings import Count, Natural, Positive, settings


@final
@settings("strategy.replan")
class Replan:
    """The rule by which a plan is replaced while it runs.

    Args:
        every: steps over whose passes a device is measured, at least ten. A training takes a new plan after a multiple of them, and
            drains its pipeline there; 0: the plan stays, and a lost device ends a run that trains nothing.
        slower: share by which the passes may be above the plan's time before a new plan is looked for.
        most: new plans in a run; None for as many as pay.
    """

    every: Natural = 0
    slower: Positive = 0.2
    most: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Operators that go from one stage to another."""

    operators: int
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.operators} operator{'s' * (self.operators > 1)} from stage {self.source} to {self.destination}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A training's change to another plan: what it took, and what it gave.

    Args:
        moved: what changed its stage.
        bytes: of weights and optimizer state that were sent between workers; `predicted_bytes` as the plan had it.
        pause_s: from when the last worker had come to the boundary until all had their programs; `predicted_pause_s` likewise.
        predicted_step_s: seconds of a step at the speeds that devices have shown: under the old plan, and the new one.
        samples_per_s: measured, under the old plan in the steps that were looked at, and under the new one until it ended; None
            where there were too few steps.
    """

    moved: tuple[Moved, ...]
    bytes: int
    predicted_bytes: int
    pause_s: float
    predicted_pause_s: float
    predicted_step_s: tuple[float, float]
    samples_per_s: tuple[float | None, float | None]

    def __str__(self) -> str:
        before = "" if self.samples_per_s[0] is None else f", {self.samples_per_s[0]:.4g} samples/s before"
        return (
            f"{', '.join(map(str, self.moved))} moved, {self.bytes / 1e6:.3g} MB sent, pause {self.pause_s:.3g} s "
            f"({self.predicted_pause_s:.3g} s predicted), {1 - self.predicted_step_s[1] / self.predicted_step_s[0]:.0%} of a step "
            f"gained as predicted{before}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A plan that was replaced.

    Args:
        first: the first request, or step, under the new plan, from 1 on.
        lost: devices that are no more; slow: how many times as long others took as the plan said, against the best. By the numbers
            of the cluster that the run began with.
        reason: what happened to a lost one.
        stages: of the new plan; devices: those that are left.
        switch: of a training, whose layers have moved; None for a stream, whose workers began anew.
    """

    first: int
    lost: tuple[int, ...] = ()
    slow: dict[int, float]
    reason: str = ""
    stages: int
    devices: tuple[int, ...]
    switch: Switch | None = None

    def __str__(self) -> str:
        what = [f"device {device} is lost ({self.reason})" for device in self.lost]
        what += [f"device {device} takes {factor:.2f} times as long as planned" for device, factor in sorted(self.slow.items())]
        left, unit = ", ".join(map(str, self.devices)), "step" if self.switch else "request"
        words = f"{'; '.join(what)}; from {unit} {self.first} on another plan runs, with {self.stages} stages on devices {left}"
        return f"{words}: {self.switch}" if self.switch else words


LEAST_PASSES = 10
"""Passes by which a device is measured at least: one alone may be twice as long for a page fault."""


@final
class DevicePace:
    """Seconds of the passes of every device against the plan's.

    Args:
        planned_s: device -> seconds of a pass, above 0.
    """

    def __init__(self, planned_s: Mapping[int, float], settings: Replan) -> None:
        self._planned_s, self._slower = planned_s, settings.slower
        self._seen: dict[int, deque[float]] = {device: deque(maxlen=max(settings.every, LEAST_PASSES)) for device in planned_s}

    def note(self, device: int, seconds: float) -> None:
        """A pass is over."""
        self._seen[device].append(seconds)

    def factors(self) -> dict[int, float]:
        """How many times as long as planned every device takes by now; empty until all have a whole window."""
        return self._halves()[1]

    def usual(self) -> dict[int, float]:
        """How many times as long as planned every device takes in the quicker half of its window; empty as `factors`."""
        older, newer = self._halves()
        return {device: min(factor, older[device]) for device, factor in newer.items()}

    def off(self) -> dict[int, float]:
        """Those of the devices that are off their time, and how many times as long as the best one they take against the plan."""
        older, newer = (_against_best(half) for half in self._halves())
        most = 1.0 + self._slower
        both = {device: sorted((factor, older[device])) for device, factor in newer.items()}
        return {device: newer[device] for device, (less, more) in both.items() if most < less and more < most * less}

    def _halves(self) -> tuple[dict[int, float], dict[int, float]]:
        """The factors by the older half of the window, and by the newer one."""
        if any(len(seen) < (seen.maxlen or 0) for seen in self._seen.values()):
            return {}, {}
        older, newer = dict[int, float](), dict[int, float]()
        for device, seen in self._seen.items():
            passes, half = list(seen), len(seen) // 2
            older[device] = statistics.fmean(passes[:half]) / self._planned_s[device]
            newer[device] = statistics.fmean(passes[half:]) / self._planned_s[device]
        return older, newer

    def expect(self, planned_s: Mapping[int, float]) -> None:
        """Take other seconds for the plan's, and measure anew."""
        self._planned_s = planned_s
        for seen in self._seen.values():
            seen.clear()


def _against_best(factors: Mapping[int, float]) -> dict[int, float]:
    best = min(factors.values(), default=1.0)
    return {device: factor / best for device, factor in factors.items()}


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
    return cluster.only(kept), kept
