"""The choices that a stage has for each operator, and what each marking of its operators costs: seconds and bytes.

What is kept on the host costs nothing while a copy of a micro-batch takes no longer than a period, each way: it then hides behind
the passes of others. What does not hide is paid in every period. One copy goes and one comes, so with fewer than three
micro-batches in flight nothing is gained.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpp.cost.amounts import RESIDENT_COPIES
from gpp.cost.problem import Problem
from gpp.cost.stage import pass_times, stage_amounts, stage_bytes
from gpp.cost.tensors import StageTensors
from gpp.graph.op_graph import mask_of
from gpp.mechanisms.marks.runs import Computing, Discarded, Runs, runs_of
from gpp.mechanisms.marks.stage import marked
from gpp.stage import Stage

HAIR = 1e-9
"""Share of a limit within which rounding may push a stage that fits exactly."""


class Marking(NamedTuple):
    """Operators that are discarded, operators that are on the host, and those of the discarded whose outputs stay; ascending."""

    recompute: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()

    def of(self, other: Mapping[int, int] | Sequence[int]) -> Marking:
        """The same marks on other operators, which are looked up by these."""
        return Marking(*(tuple(other[op] for op in named) for named in self))

    def on(self, stage: Stage) -> Stage:
        """The stage with these marks."""
        return marked(stage, recompute=self.recompute, boundaries=self.boundaries, offload=self.offload)


class Judged(NamedTuple):
    """A marking, its seconds for each micro-batch beyond those of keeping everything (of computing again, and of copies that do not
    hide), and the most bytes at a time on a device."""

    added_s: float
    peak: float
    marking: Marking

    def fits(self, limit: float) -> bool:
        """Whether a device with so many bytes can hold the stage."""
        return self.peak <= limit * (1 + HAIR)


class Choices:
    """One question: a stage, its micro-batches in flight, and the ways that its operators may be treated.

    Args:
        stage: its own marks are disregarded.
        held: micro-batches in flight on a device at a time.
        ways: of `recompute` and `offload`.
        depth: of the pipeline, as for `gpp.cost.stage.StageCost.of`.
        again: operators that may be computed again; None for all.

    `able` says for each operator of the stage, in order, whether it may be computed again.
    """

    def __init__(
        self,
        problem: Problem,
        stage: Stage,
        held: int,
        ways: Collection[str],
        depth: int | None,
        again: Collection[int] | None = None,
    ) -> None:
        self.problem, self.held, self.depth = problem, held, depth
        self.able = np.array([again is None or op in again for op in stage.ops])
        self.stage = stage.keeping
        self.at = {op: i for i, op in enumerate(stage.ops)}
        self.samples = stage.samples
        self.keeping = stage_bytes(problem, self.stage, depth)
        self._forward_s, self._backward_s = self._seconds(())
        self.period_s = self._forward_s + self._backward_s
        returns = bool(mask_of(stage.ops) & problem.graph.differentiated)
        self.recomputes = "recompute" in ways and returns and bool(self.able.any())
        self._computing: Computing = {}
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, Discarded]] = {}
        self.offloads = "offload" in ways and returns and held > RESIDENT_COPIES and self.most_moved > 0

    @cached_property
    def parting(self) -> np.ndarray:
        """[operators] whether each may be a boundary: it is discarded, and what it hands on within the stage is less than all."""
        tensors = self.tensors
        inside = np.zeros(len(self.stage.ops), dtype=bool)
        inside[[made for made, readers, *_ in tensors.tensors if readers]] = True
        return self.able & inside & (tensors.saved > tensors.handed) & self.in_runs

    def _seconds(self, recompute: tuple[int, ...]) -> tuple[float, float]:
        stage = marked(self.stage, recompute=recompute)
        return pass_times(self.problem, stage, stage.microbatch_size)[:2]

    @cached_property
    def least_peak(self) -> float:
        """Bytes that no marking is below, where marks form runs.

        In the backward of any operator the weights are there, what came in, what the operator has saved (kept, copied back or
        made again), and its own transients.
        """
        ops, b = [self.problem.graph.ops[op] for op in self.stage.ops], self.samples
        own = max((op.saved_bytes + op.transient_bytes) * b + op.fixed_bytes for op in ops)
        came_in = self.problem.sums(mask_of(self.stage.ops)).incoming * b * self.held
        return self.keeping.static + self.keeping.versions + came_in + own

    @cached_property
    def _hosts(self) -> list[tuple[float, float, float]]:
        """Of each kind of the stage's devices: latency, seconds for each byte, bytes of the host that it may use."""
        devices = [self.problem.cluster.devices[d] for d in self.problem.first_of_each_type(self.stage.devices)]
        return [
            (
                d.host_latency_s,
                d.host_sharers / d.host_bandwidth_bytes_per_s if d.host_bandwidth_bytes_per_s else np.inf,
                np.inf if d.host_memory_bytes is None else d.host_memory_bytes,
            )
            for d in devices
        ]

    @cached_property
    def most_moved(self) -> float:
        """Bytes per sample that may be on the host for each micro-batch; none if a device has no link to it."""
        if any(np.isinf(per_byte) for _, per_byte, _ in self._hosts):
            return 0.0
        return min(memory for *_, memory in self._hosts) / (self.held * self.samples)

    def residue_s(self, moved: float | np.ndarray) -> np.ndarray:
        """Seconds of a copy that do not hide in a period, for so many bytes per sample on the host."""
        moved = np.asarray(moved, dtype=float)
        took = np.max([latency + moved * self.samples * per_byte for latency, per_byte, _ in self._hosts], axis=0)
        return np.where(moved > 0, np.maximum(took - self.period_s, 0.0), 0.0)

    @cached_property
    def hidden(self) -> float:
        """Bytes per sample that can be moved each way within a period."""
        room = [(self.period_s - latency) / (per_byte * self.samples) for latency, per_byte, _ in self._hosts]
        return min(max(min(room), 0.0), self.most_moved)

    @cached_property
    def per_moved_s(self) -> float:
        """Seconds that a further byte per sample costs beyond `hidden`, where a copy takes longest."""
        return max(per_byte for _, per_byte, _ in self._hosts) * self.samples

    @cached_property
    def in_runs(self) -> bool:
        """Whether whatever is recomputed forms runs: nothing is split, and no operator declares another rule."""
        ops = self.problem.graph.ops
        return self.stage.devices_per_replica == 1 and not any(v.recompute for op in self.stage.ops for v in ops[op].variants)

    @cached_property
    def tensors(self) -> StageTensors:
        return self.problem.tensors_of(self.stage.ops)

    @cached_property
    def runs(self) -> Runs:
        return runs_of(self.problem, self.stage.ops)

    @cached_property
    def again_s(self) -> np.ndarray:
        """[kinds of devices, operators] seconds of computing each operator of the stage again."""
        kinds, t = self.problem.first_of_each_type(self.stage.devices), self.stage.devices_per_replica
        index = list(self.stage.ops)
        return np.array([self.problem.op_times(self.samples, d, t).forward_s[index] for d in kinds])

    @cached_property
    def _spare_s(self) -> np.ndarray:
        """[kinds of devices] seconds by which each waits for the slowest in a backward."""
        kinds = self.problem.first_of_each_type(self.stage.devices)
        index = list(self.stage.ops)
        took = np.array([self.problem.op_times(self.samples, d).backward_s[index].sum() for d in kinds])
        return took.max() - took

    @cached_property
    def slowest_s(self) -> np.ndarray:
        """[operators] seconds of computing each again on the device that the others wait for."""
        return self.again_s[int(self._spare_s.argmin())]

    def _discarded(self, recompute: tuple[int, ...], boundaries: tuple[int, ...]) -> tuple[float, Discarded]:
        """Seconds of computing some operators again, and what follows from their runs."""
        key = recompute, boundaries
        if key not in self._known:
            found = self.runs.discard(recompute, self.samples, boundaries, self._computing)
            again = [self.at[op] for op in found.again]
            self._known[key] = max(0.0, float((self.again_s[:, again].sum(axis=1) - self._spare_s).max())), found
        return self._known[key]

    @cached_property
    def alike(self) -> tuple[Hashable, ...]:
        """What an answer to this question depends on, operators by their positions: equal for equal stretches of a model."""
        structure = self.tensors.alike if self.in_runs else (self.stage, self.depth)
        seconds = self._forward_s, self._backward_s, self.again_s.tobytes(), self._spare_s.tobytes()
        does = self.recomputes, self.offloads, self.able.tobytes(), self.held, self.samples
        return structure, self.keeping, self.period_s, *seconds, *does, *self._hosts

    def judge(self, marking: Marking) -> Judged:
        """What a marking costs; without end if it asks for what may not be."""
        recompute, offload, boundaries = marking
        if not recompute and not offload:
            return Judged(0.0, self.keeping.peak(self.held), marking)
        if not all(self.able[[self.at[op] for op in recompute]]):
            return Judged(np.inf, np.inf, marking)
        if not self.in_runs:
            stage = marking.on(self.stage)
            forward_s, backward_s = self._seconds(recompute)
            added_s = forward_s + backward_s - self._forward_s - self._backward_s
            moved = stage_amounts(self.problem, stage).moved if offload else 0.0
            peak = stage_bytes(self.problem, stage, self.depth).peak(self.held)
        else:
            added_s, found = self._discarded(recompute, boundaries)
            kept, moved = found.kept_and_moved([self.at[op] for op in offload])
            bytes_of = self.keeping._replace(
                microbatch=kept * self.samples, transient=found.once * self.samples + found.fixed, moved=moved * self.samples
            )
            peak = bytes_of.peak(self.held)
        if offload and moved > self.most_moved * (1 + HAIR):
            return Judged(np.inf, np.inf, marking)
        return Judged(added_s + (float(self.residue_s(moved)) if offload else 0.0), float(peak), marking)
