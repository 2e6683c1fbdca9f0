"""What a schedule promises: the order of every device's passes, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import KINDS
from gpp.program.program import Task
from gpp.schedules.merge import merge

Pass = tuple[str, int]
"""Kind of a forward or backward, and micro-batch."""


class AbstractSchedule(ABC):
    """Emits passes only; `gpp.program.lower` adds communication, reduction, update.

    The order of a stage is that of one replica, and so are `num_microbatches`, and the numbers of micro-batches in it: where
    replicas take turns (`Stage.round_robin`), number m is micro-batch m R + r of the stage.
    """

    in_flight: ClassVar[Literal["depth", "all"]]
    """What a stage keeps under this order; planners reckon memory with it."""
    drains: ClassVar[bool] = True
    """Whether a program is one mini-batch, after which the pipeline is empty; else it may be any number of them."""

    @abstractmethod
    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        """Forwards before the first backward, if one backward and one forward alternate from then on; None if they do not."""

    @abstractmethod
    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        """A replica's passes in order: each F before its B, both first-in first-out (condition C4)."""

    def orders(
        self, plan: Plan, graph: OpGraph, num_samples: int, seconds: Sequence[Mapping[str, float]] | None = None
    ) -> dict[int, list[Task]]:
        """The passes of every device in order, micro-batches by the numbers of their stage.

        A stage in which nothing is differentiated (a frozen tower's) has forwards only. Stages of one device keep their own orders,
        and are merged by list scheduling.

        Args:
            num_samples: all of them; micro-batches follow from each stage's size.
            seconds: by stage and kind, of a pass of a whole micro-batch. Only a plan whose devices run several stages needs them.
        """
        own = [self._of_stage(plan, graph, s, -(-num_samples // stage.microbatch_size)) for s, stage in enumerate(plan.stages)]
        if not plan.shares_devices:
            return {device: own[stages[0]][device] for device, stages in plan.stages_of_device.items()}
        if seconds is None:
            raise ValueError("stages that share a device are merged by what their passes take: give `seconds`")
        return merge(plan, graph, own, num_samples, seconds)

    def _of_stage(self, plan: Plan, graph: OpGraph, s: int, count: int) -> dict[int, list[Task]]:
        """The passes of each device of a stage of `count` micro-batches."""
        stage, backward = plan.stages[s], plan.runs_backward(s, graph)
        out: dict[int, list[Task]] = {}
        order: list[Task] = []
        for r, replica in enumerate(stage.replicas):
            if stage.round_robin_degree > 1 or r == 0:
                own = range(r, count, stage.round_robin_degree)
                passes = self.order(plan, s, len(own))
                order = [Task(s, kind, own[m]) for kind, m in passes if backward or KINDS[kind].holds]
            out.update(dict.fromkeys(replica, order))
        return out
