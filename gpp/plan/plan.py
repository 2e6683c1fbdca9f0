"""The plan: a DAG of stages. See `Plan.validate` for what makes one valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from gpp.cost.holding import Holding
from gpp.cost.overheads import NOTHING
from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost, beside_bytes, bills_of, messages_of
from gpp.cost.together import together
from gpp.errors import Infeasible, InvalidPlan
from gpp.graph.op_graph import OpGraph, Tensor, mask_of
from gpp.plan.carrying import carried
from gpp.plan.messages import HANDLING, Handled, MessageBytes, ends, handling_s
from gpp.plan.table import heading, picture, table
from gpp.quantities import seconds
from gpp.settings import Count, Natural, NotNegative
from gpp.stage import EdgeTensors, Stage, neighbours, with_earlier
from gpp.weights.base import PipelinePosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The value that a planner minimised, by the planner's own formula.

    Args:
        value_s: seconds.
        scope: the words after the seconds, as `a micro-batch for the slowest stage`.
    """

    value_s: float
    scope: str

    def __str__(self) -> str:
        return f"{seconds(self.value_s)} {self.scope}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Stages in a topological order, numbered by position, and the edges between them.

    An edge without a tensor is an order: the successor's micro-batch waits for the predecessor's
    (that is how a chain-only system runs a branching model).

    Args:
        planner: who made it.
        search_s: seconds that the search took.
        objective: the value of a planner that minimises something else than the predicted time of a step.
        explanation: lines for the user: what the planner did, and what it may have cost.

    >>> plan.depth, plan.edges, plan.stages_of_device, plan.stages[0].in_flight
    (2, ((0, 1),), {0: (0,), 1: (1,)}, 2)
    """

    planner: str
    stages: tuple[Stage, ...]
    edges: tuple[tuple[Natural, Natural], ...]
    minibatch_size: Count
    graph_fingerprint: str
    search_s: NotNegative = 0.0
    objective: Objective | None = None
    explanation: tuple[str, ...] = ()

    upgraded: ClassVar = staticmethod(with_earlier)

    def __str__(self) -> str:
        return table(heading(self.planner, self.depth, self.minibatch_size), self.stages, self.successors)

    def _repr_html_(self) -> str:
        return picture(heading(self.planner, self.depth, self.minibatch_size), self.stages, self.edges)

    @cached_property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices with something to do, ascending."""
        return tuple(sorted({device for stage in self.stages for device in (*stage.devices, *stage.beside)}))

    @cached_property
    def mechanisms(self) -> frozenset[str]:
        """The names of the mechanisms that say something of a stage."""
        return frozenset(value.name for stage in self.stages for value in stage.mechanisms)

    @cached_property
    def periodic(self) -> bool:
        """Whether devices run side by side, in periods (`AbstractStageValue.periodic`)."""
        return any(value.periodic for stage in self.stages for value in stage.mechanisms)

    @property
    def predicted_only(self) -> bool:
        """Whether no job is made of the plan where nothing runs, because only an engine can say whether it could."""
        return any(value.predicted_only for stage in self.stages for value in stage.mechanisms)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        return neighbours(self.edges, len(self.stages))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        return neighbours(((t, s) for s, t in self.edges), len(self.stages))

    @cached_property
    def distance_to_sink(self) -> tuple[int, ...]:
        """Stages on the longest path from each stage to a sink, itself included."""
        out = [1] * len(self.stages)
        for s in reversed(range(len(self.stages))):
            out[s] = 1 + max((out[t] for t in self.successors[s]), default=0)
        return tuple(out)

    @cached_property
    def depth(self) -> int:
        """Stages on the longest path: the pipeline's depth."""
        return max(self.distance_to_sink)

    @cached_property
    def _entering(self) -> int | None:
        """Samples in flight where most are, if replicas have micro-batches of their own, or devices run in periods."""
        own = self.periodic or any(s.stride > 1 for s in self.stages)
        return max(s.in_flight for s in self.stages) if own else None

    def position(self, stage: int) -> PipelinePosition:
        """A stage's place in the pipeline, for weight policies, in micro-batches of one of its replicas.

        Where replicas have some of their own, or devices run in periods, other numbers of micro-batches are in flight than there
        are stages: the depth is what enters meanwhile.
        """
        s = self.stages[stage]
        depth = self.depth if self._entering is None else -(-self._entering // s.unit)
        return PipelinePosition(warmup=s.ahead - 1, depth=depth, accumulation=-(-self.minibatch_size // s.unit))

    @cached_property
    def stage_of_op(self) -> dict[int, int]:
        """The stage that each operator is in."""
        return {op: s for s, stage in enumerate(self.stages) for op in stage.ops}

    @cached_property
    def stages_of_device(self) -> dict[int, tuple[int, ...]]:
        """The stages that each device runs, in order; mostly one."""
        out: dict[int, tuple[int, ...]] = {}
        for s, stage in enumerate(self.stages):
            for device in stage.devices:
                out[device] = (*out.get(device, ()), s)
        return out

    @cached_property
    def work_of_device(self) -> dict[int, tuple[int, ...]]:
        """The stages that each device runs, and behind them those of others in whose passes it has a part; devices that have no
        stage of their own come last."""
        out = dict(self.stages_of_device)
        for s, stage in enumerate(self.stages):
            for device in stage.beside:
                out[device] = (*out.get(device, ()), s)
        return out

    @property
    def shares_devices(self) -> bool:
        """Whether a device runs more than one stage."""
        return len(self.stages_of_device) < sum(len(stage.devices) for stage in self.stages)

    @cached_property
    def codes(self) -> bool:
        """Whether messages are other than their tensors are (`AbstractStageValue.codes`)."""
        return any(value.codes for stage in self.stages for value in stage.mechanisms)

    def message_bytes(self, graph: OpGraph) -> dict[tuple[int, int], MessageBytes]:
        """Bytes that go over every edge of `carried`; an order-only edge has none."""
        coders, out = [messages_of(stage) for stage in self.stages], {}
        for (s, t), tensors in self.carried(graph).items():
            coder, value = coders[s]
            forward, beside = coder.message_bytes(graph, value, t, tensors)
            back = sum(tensor.bytes_per_sample for tensor in tensors if tensor.differentiable)
            out[s, t] = MessageBytes(forward, back, beside)
        return out

    @property
    def keeping(self) -> Plan:
        """The plan whose stages hold what plain passes do."""
        if not any(stage.spares for stage in self.stages):
            return self
        return replace(self, stages=tuple(stage.keeping for stage in self.stages))

    @cached_property
    def stage_of_device(self) -> dict[int, int]:
        """The first stage of each device."""
        return {device: stages[0] for device, stages in self.stages_of_device.items()}

    def edge_tensors(self, graph: OpGraph) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        """Tensors that each edge's second stage reads from its first one, in the graph's order; an order-only edge has none."""
        out: dict[tuple[int, int], list[Tensor]] = {edge: [] for edge in self.edges}
        for tensor in graph.tensors:
            src = self.stage_of_op[tensor.producer]
            for dst in sorted({self.stage_of_op[c] for c in tensor.consumers} - {src}):
                out[src, dst].append(tensor)
        return {edge: tuple(tensors) for edge, tensors in out.items()}

    def carried(self, graph: OpGraph) -> EdgeTensors:
        """Tensors that the messages of every edge carry: a tensor goes to a device once (`gpp.plan.carrying`)."""
        read = self.edge_tensors(graph)
        if not self.shares_devices or self.periodic or self.codes:
            return read
        return carried(self.stages, self.distance_to_sink, read, self._answered(read, graph))

    def shared_weights(self, graph: OpGraph) -> list[tuple[str, list[int]]]:
        """Trainable parameters that several stages read, and those stages."""
        holders: dict[str, set[int]] = {}
        for s, stage in enumerate(self.stages):
            for op in stage.ops:
                for name in graph.trained_by[op]:
                    holders.setdefault(name, set()).add(s)
        return [(name, sorted(stages)) for name, stages in sorted(holders.items()) if len(stages) > 1]

    def runs_backward(self, stage: int, graph: OpGraph) -> bool:
        """Whether a stage has backward passes. It has none if it and everything before it is frozen."""
        return graph.differentiated == graph.all_mask or bool(mask_of(self.stages[stage].ops) & graph.differentiated)

    def late(self, stage: int, holds: Holding) -> int:
        """Micro-batches that a stage holds late where `holds` asks for it, by each replica's own.

        By the samples in flight, so that stages of other micro-batch sizes, and of other strides, hold as much.
        """
        own = self.stages[stage]
        return (max(other.in_flight for other in self.stages) - own.in_flight) // own.unit if holds.levels else 0

    def has_weight_gradients(self, stage: int, graph: OpGraph) -> bool:
        """Whether a stage's backward makes gradients of weights. Without any, nothing is left for later."""
        return self.runs_backward(stage, graph) and any(graph.trained_by[op] for op in self.stages[stage].ops)

    def returning(self, graph: OpGraph) -> set[tuple[int, int]]:
        """Edges of `carried` with messages backwards; an order-only edge has them too, if both of its ends run backwards."""
        read = self.edge_tensors(graph)
        orders = {edge for edge in self._answered(read, graph) if not read[edge]}
        return {e for e, own in self.carried(graph).items() if e in orders or any(tensor.differentiable for tensor in own)}

    def _answered(self, read: EdgeTensors, graph: OpGraph) -> set[tuple[int, int]]:
        """Edges over which the reader's backward hands something to the maker's, with the tensors that are read over each."""
        return {
            (s, t)
            for (s, t), tensors in read.items()
            if any(tensor.differentiable for tensor in tensors)
            or (not tensors and self.runs_backward(s, graph) and self.runs_backward(t, graph))
        }

    def validate(self, problem: Problem, peaks: Mapping[int, float] | None = None) -> None:
        """Prove conditions C1 to C4 of the paper and Eq. 2 (memory).

        Args:
            peaks: device -> the most bytes that it holds, where the order of its passes is known; None: what the samples in
                flight of its stages take.

        Raises:
            InvalidPlan: as `check_stages`; for another graph or mini-batch; too many replicas; a loss is cut that needs it whole.
            Infeasible: a stage needs more memory than its device has.
        """
        if self.graph_fingerprint != problem.graph.fingerprint:
            raise InvalidPlan(
                "the plan was made for another graph (fingerprint "
                f"{self.graph_fingerprint}, this one is {problem.graph.fingerprint}). Fix: plan again"
            )
        if self.minibatch_size != problem.minibatch_size:
            raise InvalidPlan(
                f"the plan is for minibatch_size={self.minibatch_size}, the run asks for {problem.minibatch_size}. Fix: set "
                f"minibatch_size={self.minibatch_size}, or plan again"
            )
        if problem.regime.weights.flushes:
            for s, stage in enumerate(self.stages):
                for value in stage.mechanisms:
                    value.check_pipeline(s, trains=True)
        self.check_stages(problem.graph, problem.cluster.num_devices)
        for s, stage in enumerate(self.stages):
            whole, most = stage.microbatch_size >= self.minibatch_size and len(stage.replicas) == 1, problem.max_replicas
            if mask_of(stage.ops) & problem.minibatch_ops and not whole:
                raise InvalidPlan(
                    f"stage {s} cuts the mini-batch, but holds a loss that is to have it whole. Fix: plan again, or set "
                    "loss.scope=microbatch"
                )
            if most and len(stage.replicas) > most and not problem.copies:
                raise InvalidPlan(f"stage {s} has {len(stage.replicas)} replicas, and may have {most} at most. Fix: fewer devices")
            for added, value in bills_of(stage):
                added.check(problem, s, stage, value, self.position(s))
        self._check_memory(problem, peaks)

    def check_stages(self, graph: OpGraph, num_devices: int) -> None:
        """Prove that the stages are a partition of the graph's operators that can run, whatever it costs.

        Raises:
            InvalidPlan: not a partition of the operators into convex stages, stages out of order, a data dependency without
                an edge, devices that do not exist, sizes out of range.
        """
        self._check_partition(graph, num_devices)
        for a, b in self.edges:
            if not 0 <= a < b < len(self.stages):
                raise InvalidPlan(f"edge {a}->{b} does not go forward; stages must be in a topological order")
        if len(set(self.edges)) < len(self.edges):
            twice = next(edge for edge in self.edges if self.edges.count(edge) > 1)
            raise InvalidPlan(f"edge {twice[0]}->{twice[1]} is given twice")
        for s, stage in enumerate(self.stages):
            if not graph.is_convex(mask_of(stage.ops)):
                raise InvalidPlan(f"stage {s} is not convex: a path leaves it and comes back")
            self._check_sizes(s)
            for value in stage.mechanisms:
                value.check(s, stage, self.stages, backward=self.runs_backward(s, graph))
        owner, edges = self.stage_of_op, set(self.edges)
        for tensor in graph.tensors:
            for consumer in tensor.consumers:
                a, b = owner[tensor.producer], owner[consumer]
                if a != b and (a, b) not in edges:
                    raise InvalidPlan(f"tensor {tensor.name} goes from stage {a} to {b}, but the plan has no such edge")
        tensors, trains = self.edge_tensors(graph), bool(graph.differentiated)
        for kind in dict.fromkeys(type(value) for stage in self.stages for value in stage.mechanisms):
            kind.check_plan(self.stages, tensors, num_devices, trains=trains)

    def _check_partition(self, graph: OpGraph, num_devices: int) -> None:
        """Every operator is in one stage, and every stage has operators and devices."""
        owner: dict[int, int] = {}
        for s, stage in enumerate(self.stages):
            for op in stage.ops:
                if op in owner:
                    raise InvalidPlan(f"operator {op} is in stages {owner[op]} and {s}")
                owner[op] = s
            if not stage.ops or not stage.devices:
                raise InvalidPlan(f"stage {s} has no operators or no devices")
            if list(stage.ops) != sorted(set(stage.ops)):
                raise InvalidPlan(f"stage {s}: operators must ascend, got {list(stage.ops[:8])}")
            used = stage.devices
            if len(set(used)) != len(used) or any(not 0 <= d < num_devices for d in used):
                raise InvalidPlan(f"stage {s} must hold different devices out of 0..{num_devices - 1}, got {list(used[:8])}")
        if set(owner) != set(range(graph.num_ops)):
            raise InvalidPlan(f"operators {sorted(set(range(graph.num_ops)) ^ set(owner))[:8]} are in no stage or do not exist")

    def _check_sizes(self, s: int) -> None:
        """Micro-batch and samples in flight fit the mini-batch and the replicas."""
        stage, replicas = self.stages[s], len(self.stages[s].replicas)
        b, unit = stage.microbatch_size, stage.unit
        if stage.k < 1:
            raise InvalidPlan(f"stage {s}: k={stage.k}, the passes of one direction in a row, must be at least 1")
        if not 1 <= b <= self.minibatch_size or stage.in_flight < b or stage.in_flight % unit:
            times = f" times {stage.stride}" if unit > b else ""
            rule = f"must be in 1..{self.minibatch_size}, and in-flight {stage.in_flight} a multiple of it{times}"
            raise InvalidPlan(f"stage {s}: micro-batch {b} {rule}")
        if replicas > unit:
            raise InvalidPlan(f"stage {s}: {replicas} replicas share out {unit} samples. Fix: fewer devices, or more samples")
        if stage.sharing and (count := -(-self.minibatch_size // b)) % stage.stride:
            raise InvalidPlan(
                f"stage {s}: {replicas} replicas have micro-batches {stage.dealt}, and must divide the {count} of a mini-batch. "
                f"Fix: micro-batches of which a multiple of {stage.stride} make a mini-batch, or the stage without its "
                f"mechanisms.{stage.sharing.name}"
            )

    def bills(self, problem: Problem) -> tuple[StageCost, ...]:
        """The bill of every stage, in order, with its messages and its share of a step's fixed costs."""
        if problem.regime.weights.flushes:
            bills = tuple(StageCost.of(problem, stage) for stage in self.stages)
        else:
            bills = tuple(StageCost.of(problem, stage, self.position(s).depth) for s, stage in enumerate(self.stages))
        if problem.overheads == NOTHING and not self.codes:
            return bills
        # The fixed cost of a pass is in the stage's own bill.
        last = {stages[-1] for stages in self.stages_of_device.values()}
        step_s = [problem.overheads.step_s if s in last else 0.0 for s in range(len(self.stages))]
        found = zip(bills, self._handling_s(problem), step_s, strict=True)
        return tuple(bill.plus(forward, backward, step) for bill, (forward, backward), step in found)

    def beside_s(self, problem: Problem) -> list[tuple[float, float]]:
        """Seconds of each stage's forward and backward beside its operators: fixed costs and messages."""
        fixed = problem.overheads
        if fixed == NOTHING and not self.codes:
            return [(0.0, 0.0)] * len(self.stages)
        return [(forward + fixed.forward_s, backward + fixed.backward_s) for forward, backward in self._handling_s(problem)]

    def handled(self, problem: Problem) -> Iterator[Handled]:
        """Both ends of every message of a mini-batch."""
        graph = problem.graph
        carried, returning, sizes = self.carried(graph), self.returning(graph), self.message_bytes(graph)
        return ends(self.stages, carried, returning, sizes, self.minibatch_size, problem)

    def _handling_s(self, problem: Problem) -> list[tuple[float, float]]:
        known, key = HANDLING.of(problem), (self.stages, self.edges, self.minibatch_size)
        if key not in known:
            known[key] = handling_s(self.stages, self.handled(problem), self.minibatch_size)
        return known[key]

    def device_memory(self, problem: Problem, in_flight: Mapping[int, int]) -> dict[int, float]:
        """Peak bytes on every device: of its stages, one of which computes at a time, and of those that it computes for others.

        Args:
            in_flight: stage -> samples held in full at a time, over all replicas.
        """
        needs: dict[int, list[tuple[float, float]]] = {}
        beside: dict[int, float] = {}
        holds = problem.regime.holds
        for s, (stage, bill) in enumerate(zip(self.stages, self.bills(problem), strict=True)):
            full, memory = -(-in_flight[s] // stage.unit), bill.memory
            need = max(memory.peak(*state) for state in holds.states(full, self.late(s, holds)))
            for device in stage.devices:
                needs.setdefault(device, []).append((need, memory.passing))
            for device, more in beside_bytes(problem, stage):
                beside[device] = beside.get(device, 0.0) + more
        out = {device: together(own) for device, own in needs.items()}
        return out | {device: out.get(device, 0.0) + more for device, more in beside.items()}

    def _check_memory(self, problem: Problem, peaks: Mapping[int, float] | None) -> None:
        devices = problem.cluster.devices
        needs = peaks or self.device_memory(problem, {s: stage.in_flight for s, stage in enumerate(self.stages)})
        lack, device = max((need - devices[d].memory_bytes, -d) for d, need in needs.items())
        if lack > 0:
            stages, need, have = self.stages_of_device.get(-device, ()), needs[-device], devices[-device].memory_bytes
            who = f"stage {stages[0]} needs" if len(stages) == 1 else f"stages {', '.join(map(str, stages))} together need"
            who = who if stages else f"device {-device}, which works for stages of others, needs"
            raise Infeasible(
                f"{who} {need:.3e} bytes on a device, which has {have:.3e}: {lack:.3e} are missing",
                f"give the device {need:.3e} bytes, or a smaller micro-batch or mini-batch",
            )
