"""Types of devices: those that no plan can tell apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from gpp.cluster import Cluster, Link


@dataclass(frozen=True)
class Kinds:
    """Groups of devices that stand for each other.

    Args:
        groups: device numbers of each type, ascending.
    """

    cluster: Cluster
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Kinds:
        """The finest types: equal devices with equal links to every other device."""
        found: dict[tuple[int, int], list[int]] = {}
        for device, place in enumerate(cluster.wiring.places):
            found.setdefault((cluster.devices.index(cluster.devices[device]), place), []).append(device)
        return cls(cluster, tuple(map(tuple, found.values())))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.groups))

    @property
    def num_states(self) -> int:
        """Multisets of used devices, and the type of the next one."""
        return len(self.groups) * math.prod(count + 1 for count in self.counts)

    def joined(self, seconds: list[float], most: int) -> Kinds:
        """Fewer types, so that there are at most so many states: the two whose devices differ least in time become one, repeatedly.

        Args:
            seconds: of the whole model on each device.
        """
        groups = list(self.groups)
        while len(groups) > 1 and Kinds(self.cluster, tuple(groups)).num_states > most:

            def apart(pair: tuple[int, int], groups: list[tuple[int, ...]] = groups) -> float:
                together = [seconds[d] for i in pair for d in groups[i]]
                return max(together) / min(together)

            a, b = min(combinations(range(len(groups)), 2), key=lambda pair: (apart(pair), pair))
            groups[a] = tuple(sorted(groups[a] + groups[b]))
            del groups[b]
        return Kinds(self.cluster, tuple(groups))

    def links(self, a: int, b: int) -> tuple[Link, ...]:
        """The links, each once, between a device of one type and another device of the other; none within a type of one device."""
        return self.cluster.wiring.between(self.groups[a], self.groups[b]) if a != b or len(self.groups[a]) > 1 else ()

    def move_s(self, a: int, b: int, num_bytes: float) -> float:
        """Seconds of a message from a device of one type to one of another, over the slowest of their links."""
        return max((link.transfer_s(num_bytes) for link in self.links(a, b)), default=0.0)
