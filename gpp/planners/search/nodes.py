"""Devices of stages, inside one node first, on a cluster of equal devices: compiled (`gpp.compiled`)."""

from __future__ import annotations

from gpp.compiled import integers


class NodeRoom:
    """Deals out the devices of some nodes.

    Args:
        nodes: the devices of each node, ascending.
    """

    def __init__(self, nodes) -> None:
        self.nodes, self.num_nodes, self.size = nodes, len(nodes), max(len(devices) for devices in nodes)
        # Free devices of each node, and the nodes that have so many.
        self.free, self.having = integers(self.num_nodes), integers(self.size + 1)

    def deal(self, counts):
        """Devices for stages in stage order: stages of whole nodes first, then each into its predecessor's node if there is room,
        else into the fullest with room.

        Args:
            counts: replicas of each stage.

        Raises:
            ValueError: they are more than all devices.
        """
        if sum(counts) > sum([len(devices) for devices in self.nodes]):
            raise ValueError(f"{sum(counts)} devices are asked for, and there are fewer")
        for free in range(self.size + 1):
            self.having[free] = 0
        for node in range(self.num_nodes):
            self.free[node] = len(self.nodes[node])
            self.having[self.free[node]] += 1
        out = [()] * len(counts)
        before = 0
        for s in sorted(range(len(counts)), key=[-(count // self.size) for count in counts].__getitem__):
            count = counts[s]
            node = before if self.free[before] >= count else self._fullest_with(count)
            if node >= 0:
                out[s] = self._take(node, count)
                before = node
                continue
            chosen = ()
            while len(chosen) < count:
                chosen += self._take(self._roomiest(), count - len(chosen))
            out[s] = tuple(sorted(chosen))
        return tuple(out)

    def _take(self, node: int, count: int):
        """The first free devices of a node, at most so many."""
        free = self.free[node]
        devices = self.nodes[node]
        first = len(devices) - free
        count = min(count, free)
        self.having[free] -= 1
        self.having[free - count] += 1
        self.free[node] = free - count
        return devices[first : first + count]

    def _fullest_with(self, count: int) -> int:
        """The first node with the least room of those with enough; -1 if there is none."""
        for free in range(count, self.size + 1):
            if self.having[free]:
                return self._first(free)
        return -1

    def _roomiest(self) -> int:
        """The first node with the most room."""
        free = self.size
        while not self.having[free]:
            free -= 1
        return self._first(free)

    def _first(self, free: int) -> int:
        node = 0
        while self.free[node] != free:
            node += 1
        return node
