"""The promise of a schedule: the order of every device's passes, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from gpp.cluster import Cluster
from gpp.cost.holding import Holding
from gpp.cost.problem import Remembered
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.kinds import KINDS, pass_seconds
from gpp.program.program import Task
from gpp.routing import new
from gpp.schedules.flow import Flow, Work, flow_of
from gpp.schedules.merge import merge
from gpp.settings import file_word

Pass = tuple[str, int]
"""Kind of a pass, and micro-batch."""

SIMULATED = 3
"""The number of orders of a `RankedSchedule` that are simulated."""


class AbstractSchedule(ABC):
    """A schedule emits passes only; `gpp.program.lower` adds communication, reduction, update."""

    if TYPE_CHECKING:
        holds: ClassVar[Holding]
    else:  # a class without it is abstract, as one without `orders` is
        holds = property(abstractmethod(lambda self: Holding()))
    """The samples that a stage holds under this order. Planners reckon memory with it."""
    needs_bills: ClassVar[bool] = False
    """Whether an order depends on seconds or bytes, so that `orders` must be given bills and limits."""
    overlaps_steps: ClassVar[bool] = False
    """Whether a device must begin a step before others have ended the last one, for the schedule to gain anything."""
    alternates: ClassVar[bool] = False
    """Whether the compiled search may time plans under this order: once a stage holds as many micro-batches as `holds` says, a
    backward and a forward take turns, as in 1F1B; in GPipe, which holds all, no forward is left."""
    drains: ClassVar[bool] = True
    """Whether the pipeline is empty after each mini-batch, so that a program is one of them; else it may be any number."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(cls.__dict__.get("holds", Holding()), Holding | property):
            fix = f"write holds = EVERYTHING, DEPTH or Holding(ahead=...) in class {cls.__name__}, all of gpp.cost.holding"
            raise InvalidConfig("strategy.schedule", cls.__qualname__, "has a `holds` that is no Holding", fix)

    @property
    def name(self) -> str:
        """The word that chooses it (`strategy/schedule=gpipe`): that of its file, unless no file can have it (`1f1b`)."""
        return file_word(self)

    @property
    def per_device(self) -> int:
        """Stages of each device. A plan is made for that many times the devices; then `arranged` puts its stages together."""
        return 1

    @property
    def draft(self) -> AbstractSchedule:
        """The schedule that judges a planner's candidates: a quick one that holds as much as this."""
        return self

    def unfolded(self, cluster: Cluster) -> Cluster:
        """The cluster that a planner is asked with: one device for each stage."""
        return cluster

    def arranged(self, plan: Plan, seconds: Sequence[float], num_devices: int) -> Plan:
        """A plan for the unfolded cluster, `per_device` of its stages on each device.

        Args:
            seconds: seconds of a micro-batch at each stage.
            num_devices: the number of the cluster's devices.

        Raises:
            Infeasible: its stages cannot be put together.
        """
        return plan

    @property
    def unbounded(self) -> str:
        """The kind of its orders where `gpp.planners.bounds.lower_bound` does not cover them, as a user calls it; else empty."""
        if not self.drains:
            return "a continuous pipeline"
        if self.holds.parts:
            return "backwards in two halves"
        return "" if self.per_device == 1 else "several stages of a schedule on each device"

    def warmup(self, plan: Plan, stage: int, num_microbatches: int) -> int | None:
        """Forwards before the first backward, if one backward and one forward alternate from then on; None if they do not.

        Searches score candidates by this number without asking for an order (`gpp.simulate.recurrence`), so a schedule that
        alternates should give it; with None they simulate every candidate.
        """
        return None

    @abstractmethod
    def orders(self, work: Work) -> dict[int, list[Task]]:
        """The passes of every device in order, micro-batches by the numbers of their stage.

        A stage in which nothing is differentiated (a frozen tower's) has forwards only; one that has weights to train has a B for
        each micro-batch, or what stands in place of it.

        Raises:
            ValueError: the order depends on bills, and the work has none.
        """

    def flow(self, work: Work) -> Flow:
        """The passes that the schedule puts in order, and the memory that it keeps to."""
        return flow_of(work, self.holds.parts)

    def choices(self, work: Work) -> list[dict[int, list[Task]]]:
        """Orders of which the one with the shortest simulated step is to run; what `orders` gives is one of them."""
        return [self.orders(work)]


class RankedSchedule(AbstractSchedule):
    """Orders found by modelled times, of which the few that look best are simulated."""

    needs_bills: ClassVar[bool] = True

    @abstractmethod
    def ranked(self, work: Work) -> list[dict[int, list[Task]]]:
        """Orders that can run, the best first by the schedule's own reckoning; at least one."""

    def orders(self, work: Work) -> dict[int, list[Task]]:
        return self.choices(work)[0]

    def choices(self, work: Work) -> list[dict[int, list[Task]]]:
        return self.ranked(work)[:SIMULATED]


class StageSchedule(AbstractSchedule):
    """A rule for each stage of its own: an order that follows from where the stage is.

    The order of a stage is that of one replica, and so are `num_microbatches`, and the numbers of micro-batches in it: number m is
    the m-th that the replica has a part in (`Stage.stride`).
    """

    @abstractmethod
    def order(self, plan: Plan, stage: int, num_microbatches: int) -> list[Pass]:
        """A replica's passes in order, each kind first-in first-out (condition C4 of the GraphPipe paper).

        F stands before its B, or before what stands in place of it. A schedule that has parts of backwards has them of every
        stage; `orders` has a B where there are none.
        """

    def orders(self, work: Work) -> dict[int, list[Task]]:
        """The passes of every device. Stages of one device keep their own orders, which list scheduling merges."""
        plan, count = work.plan, work.num_samples
        own = [self._of_stage(plan, work.graph, s, -(-count // stage.microbatch_size)) for s, stage in enumerate(plan.stages)]
        if not plan.shares_devices:
            return {device: own[stages[0]][device] for device, stages in plan.stages_of_device.items()}
        return merge(plan, work.graph, own, count, [pass_seconds(bill) for bill in work.costs])

    def _of_stage(self, plan: Plan, graph: OpGraph, s: int, count: int) -> dict[int, list[Task]]:
        """The passes of each device of a stage of `count` micro-batches."""
        stage = plan.stages[s]
        written = {kind: kind for kind, row in KINDS.items() if row.holds or plan.runs_backward(s, graph)}
        if not plan.has_weight_gradients(s, graph):
            # What stands in place of a pass and makes gradients of inputs is all of it, and nothing is left to the rest.
            parts = {kind: KINDS[kind] for kind in written if KINDS[kind].instead_of}
            written |= {kind: row.instead_of if row.returns else "" for kind, row in parts.items()}
        orders = list[list[Task]]()
        for first in range(stage.stride):
            own = range(first, count, stage.stride)
            passes = self.order(plan, s, len(own))
            orders.append([new(Task, (s, written[kind], own[m])) for kind, m in passes if written.get(kind)])
        return {device: orders[stage.first(device)] for device in stage.devices}


ORDERS = Remembered[tuple[object, ...], Mapping[int, Sequence[Task]]]()
"""Of schedule, weights, stages, edges and samples: the passes of every device, where they took long to find."""
