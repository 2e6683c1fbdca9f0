"""The numbers of a problem that the compiled search reads, for one micro-batch size."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from gpp.compiled import integers, reals
from gpp.cost.holding import Held
from gpp.cost.problem import Problem
from gpp.graph.op_graph import bits
from gpp.graph.sums import listed
from gpp.memory import fits_whole
from gpp.program.program import NORM_BYTES

MOST_DEVICES = 62
"""Devices whose sets are the bits of a machine's whole number."""

ORDER_ONLY = 1 << 20
"""In place of the number of tensors of an edge that has none, and only keeps its ends in order."""

KEPT = 6
"""The best plans of a walk, which the simulator judges."""

MANY = 12
"""Stages beyond which a walk has too few changes to lose any: it looks where most is to do, and begins by going down alone."""


class Posed(NamedTuple):
    """A problem, and what a search says of its stages.

    Args:
        replicas: micro-batch size -> the numbers of replicas that a stage may have.
        needs: bytes of a stage on each of its devices, and of these `StageBytes.passing`, given its operators, its number of
            devices, the micro-batch size, the stages from it to the sink and the depth of the plan.
    """

    problem: Problem
    replicas: Mapping[int, Sequence[int]]
    needs: Callable[[int, int, int, int, int], tuple[float, float]]


@final
class ProblemNumbers:
    """The numbers of one problem and micro-batch size, as arrays; and, by callback, what depends on a stage.

    Args:
        most_stages: of a plan.
    """

    def __init__(self, posed: Posed, microbatch_size: int, most_stages: int) -> None:
        problem, graph, cluster = posed.problem, posed.problem.graph, posed.problem.cluster
        self.posed, self.microbatch_size = posed, microbatch_size
        self.num_ops, self.num_devices, self.most_stages = graph.num_ops, cluster.num_devices, most_stages
        self.count = problem.minibatch_size // microbatch_size
        self.most_units = most_stages * 4 + 4 * self.num_devices
        self.most_pairs = 8 * self.most_units
        self.producer = array("q", [tensor.producer for tensor in graph.tensors])
        self.first_reader, self.reader = listed(tensor.consumers for tensor in graph.tensors)
        self.ahead_bytes = array("d", [problem.sent_bytes(tensor) for tensor in graph.tensors])
        self.back_bytes = array("d", [tensor.bytes_per_sample if tensor.differentiable else -1.0 for tensor in graph.tensors])
        every = range(self.num_devices)
        links = [[cluster.link(a, b) if a != b else None for b in every] for a in every]
        self.latency = array("d", [link.latency_s if link else 0.0 for row in links for link in row])
        self.bandwidth = array("d", [link.bandwidth_bytes_per_s if link else 1.0 for row in links for link in row])
        self.memory = array("d", [device.memory_bytes for device in cluster.devices])
        self.held = array("q", [0, *(int(problem.regime.held(d, self.count)) for d in range(1, most_stages + 1))])
        over = problem.overheads
        self.overheads = array(
            "d",
            [
                over.message_s,
                over.send_s_per_byte,
                over.receive_s_per_byte,
                over.send_s_per_tensor,
                over.receive_s_per_tensor,
                over.step_s,
            ],
        )
        self.norm_bytes = float(NORM_BYTES) if problem.global_norm else 0.0
        self.work = array("q", [0])
        self.fixed, self.parts_updates = array("d", [over.forward_s, over.backward_s]), problem.updates is not None
        self.scarce = not fits_whole(problem)
        types = sorted(set(problem.type_of_device))
        self.num_types = len(types)
        self.type_of = array("q", [types.index(of) for of in problem.type_of_device])
        self.forward_s, self.backward_s = array("d"), array("d")
        for device in types:
            for count in range(self.num_devices + 1):
                divides = count and microbatch_size % count == 0
                times = problem.op_times(microbatch_size // count, device) if divides else None
                self.forward_s.extend(times.forward_s if times else [0.0] * graph.num_ops)
                self.backward_s.extend(times.backward_s if times else [0.0] * graph.num_ops)
        self.differentiated = array("q", [graph.differentiated >> op & 1 for op in range(graph.num_ops)])
        trained = dict[int, int]()
        for param in graph.params:
            if param.trainable and (readers := graph.readers[param.name]):
                trained[readers] = trained.get(readers, 0) + param.num_bytes
        self.param_bytes = array("d", trained.values())
        self.first_trained, self.trained = listed(map(bits, trained))
        update = problem.cost.update_s
        lines = [_line(update(1e3, device), update(1e9, device)) for device in cluster.devices]
        self.update_fixed, self.update_each = (array("d", values) for values in zip(*lines, strict=True))
        self.update_none = array("d", [update(0.0, device) for device in cluster.devices])
        ok = posed.replicas[microbatch_size]
        self.allowed = array("q", [int(count in ok) for count in range(self.num_devices + 1)])  # never none
        # Powers of two differ modulo 67, so that a remainder says which one it is of.
        self.bit_of = array("q", [0] * 67)
        for d in range(66):
            self.bit_of[(1 << d) % 67] = d
        self.neighbours = (*listed(map(bits, graph.successors)), *listed(map(bits, graph.predecessors)))

    def needs(self, mask: int, count: int, distance: int, deepest: int) -> tuple[float, float]:
        """`Posed.needs` at this micro-batch size."""
        return self.posed.needs(mask, count, self.microbatch_size, distance, deepest)

    def in_flight(self, distance: int, deepest: int) -> tuple[Held, ...]:
        """The states of a stage that decide what it holds, given the stages from it to the sink and the depth of the plan."""
        holds = self.posed.problem.regime.holds
        return holds.states(holds.full(distance, self.count), holds.late(distance, deepest, self.count))

    def ring(self, devices: int) -> tuple[tuple[float, float], ...]:
        """A sum over a set of devices: `Cluster.allreduce_lines`, but for those that are below another one everywhere."""
        lines = sorted(self.posed.problem.cluster.allreduce_lines(tuple(bits(devices))), reverse=True)
        return tuple(line for i, line in enumerate(lines) if all(line[1] > other[1] for other in lines[:i]))


def _line(few: float, many: float) -> tuple[float, float]:
    """Fixed seconds, and those for each byte, from the seconds for 1e3 and for 1e9 bytes."""
    each = (many - few) / (1e9 - 1e3)
    return few - each * 1e3, each


@final
class PlanArrays:
    """The arrays that the parts of the search share: a plan, and its shape.

    Stages are numbered as the plan has them in `stage_of`, `devices` and `distance`; by their place in the topological order
    else. A *unit* is a replica, a *pair* are two replicas of which the first sends to the second.
    """

    def __init__(self, facts: ProblemNumbers) -> None:
        stages, units, pairs = facts.most_stages, facts.most_units, facts.most_pairs
        self.stage_of, self.devices = integers(facts.num_ops), integers(stages)
        self.order, self.distance, self.update_s = integers(stages), integers(stages), reals(stages)
        self.first_unit, self.unit_stage, self.unit_device = integers(stages + 1), integers(units), integers(units)
        self.first_out, self.first_in, self.in_pair = integers(units + 1), integers(units + 1), integers(pairs)
        self.pair_src, self.pair_dst, self.pair_back = integers(pairs), integers(pairs), integers(pairs)
        self.pair_late, self.pair_ahead_s, self.pair_back_s = reals(pairs), reals(pairs), reals(pairs)
        self.pass_s, self.sum_s, self.sum_set = reals(2 * stages), reals(stages + 1), integers(stages + 1)
        self.sizes = integers(3)
