"""The least slowest stage over all cuts of the operators' own order, and over all ways to treat the operators of every stage.

Shares nothing with the planners of chains: cuts are enumerated, and a stage's ways are those of `tests.oracle.markings`. What a
stage holds at its position, and the versions of the weights there, are written down once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

from gpp.cost.problem import Problem
from tests.oracle.markings import AGAIN, END, HOST, KEEP, Markings


class _AsBilled(Markings):
    """The ways of a stage whose samples are known: what a stage that keeps all takes once is then no line, but a maximum."""

    def _once(self, slopes: list[float], firsts: list[float]) -> float:
        fixed = [first - slope for slope, first in zip(slopes, firsts, strict=True)]
        floor = sum(t.bytes_per_sample for t in self._coming() if t.differentiable)
        own = (slope * self.samples + more for slope, more in zip(slopes, fixed, strict=True))
        return self._back() * self.samples + max(floor * self.samples, *own)


@dataclass(slots=True)
class MarkedChains:
    """Every chain of one problem at its given micro-batch size, one device a stage, devices in order.

    Args:
        ways: of `recompute` and `offload`.
        stashes: whether a stage keeps a version of its weights for every micro-batch in flight, and the pipeline does not drain.
    """

    problem: Problem
    ways: tuple[str, ...]
    stashes: bool

    def best_s(self) -> float | None:
        """Seconds of the slowest stage of the best chain; None if none fits."""
        n, found = self.problem.graph.num_ops, list[float]()
        known: dict[tuple[int, int, int, int], float | None] = {}
        for count in range(1, min(n, self.problem.cluster.num_devices) + 1):
            for cuts in combinations(range(1, n), count - 1):
                keys = [(i, j, s, count) for s, (i, j) in enumerate(pairwise((0, *cuts, n)))]
                for key in keys:
                    if key not in known:
                        known[key] = self.stage_s(*key)
                seconds = [one for one in map(known.get, keys) if one is not None]
                if len(seconds) == count:
                    found.append(max(seconds))
        return min(found, default=None)

    def stage_s(self, first: int, last: int, number: int, count: int) -> float | None:
        """The least seconds of a stage of operators first .. last - 1, number `number` of `count`; None if it does not fit."""
        size = self.problem.microbatch_size
        assert size is not None
        device = self.problem.cluster.devices[number]
        behind = count - number
        held = behind if self.stashes else min(behind, self.problem.minibatch_size // size)
        ops = tuple(range(first, last))
        able = [KEEP, *([AGAIN, END] if "recompute" in self.ways else [])]
        if "offload" in self.ways and device.host_bandwidth_bytes_per_s is not None and held > 2:
            able.append(HOST)
        graph = self.problem.graph
        trained = {name for op in ops for name in graph.ops[op].params}
        weights = sum(p.num_bytes for p in graph.params if p.name in trained and p.trainable)
        room = device.memory_bytes - weights * (held - 1) * self.stashes
        ways = _AsBilled(self.problem, ops, (number,), held, size).all(tuple(able))
        return min((way.seconds for way in ways if way.peak <= room * (1 + 1e-9)), default=None)
