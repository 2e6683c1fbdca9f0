"""Times of a program on a cost model, by its longest path.

Every device walks its static list. A pass starts when the device is free and its messages have arrived; a send leaves at once on
its own first-in first-out channel and overlaps with compute; a copy to the host or back goes on a channel of its device, one for
each way; a reduction starts when all its devices have reached it. Channels do not contend with each other.
The order of every device is static, so the times are a longest path (`gpp.simulate.longest_path`) in the graph of waits
(`gpp.program.waits`): no event queue is needed, unless devices share processors (`gpp.simulate.crowded`). This is the exact
prediction; searches take the fast one where it holds (`gpp.simulate.recurrence`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from gpp.cost.problem import Problem
from gpp.errors import MalformedProgram
from gpp.plan.plan import Plan
from gpp.program.added import WHOLE, copy_costs, lowerings, part_of
from gpp.program.held import device_peaks
from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, KINDS, RECEIVES, UPDATE, UPDATES, Action, Role, pass_seconds
from gpp.program.program import NORM_BYTES, Program, ReduceGroup, reduce_groups
from gpp.simulate.crowded import shared_times
from gpp.simulate.longest_path import LongestPath, Times
from gpp.simulate.messages import message_bytes, message_rates
from gpp.simulate.period import repeating
from gpp.timeline import Event, Metrics, StageMemory, Timeline

SHOWN = 3
"""Mini-batches that the timeline of a pipeline which does not drain shows: its pattern may take more than one to repeat."""

STEADY = 1e-9
"""Share of a period by which rounding may move an event's time."""


def simulate(program: Program, plan: Plan, problem: Problem, *, record: bool = True) -> Timeline:
    """The timeline of one training step of many; of a program that does not drain, of `SHOWN` mini-batches in its steady state.

    Args:
        record: keep the events; a planner that scores candidates needs only the metrics.

    Raises:
        MalformedProgram: the program cannot run to its end.

    >>> timeline = simulate(program, plan, problem)
    >>> round(timeline.metrics.iteration_s, 3), round(timeline.metrics.bubble_fraction, 3), len(timeline.events)
    (15.0, 0.2, 26)
    """
    waits, count = program.waits, program.minibatches
    costs = Costs.of(program, plan, problem)
    events: list[Event] = []
    cores = problem.cluster.processors if problem.cluster.crowded(plan.num_devices) else None
    if count > 1:
        if cores:
            times, _ = shared_times(waits, costs.seconds, costs.late, cores, repeats=1)
        else:
            times = LongestPath.of(waits, costs.seconds, costs.late).times()
        updates = (Event(device, UPDATE, s, 0, times.begin_s[node], times.end_s[node]) for node, s, device in waits.updates)
        begin, iteration_s = steady_period(update_ends(updates, plan), plan)
        if record:
            events = within(_events(program, costs, times, 0.0), begin, SHOWN * iteration_s)
    else:
        times, iteration_s = (
            shared_times(waits, costs.seconds, costs.late, cores)
            if cores
            else LongestPath.of(waits, costs.seconds, costs.late).period()
        )
        if record:
            events = _events(program, costs, times, min(times.first_s[: len(waits.devices)], default=0.0))
    held = max_in_flight(program, plan)
    peaks = plan.device_memory(problem, held) if plan.periodic else device_peaks(program, plan.bills(problem))
    memory = {device: round(need) for device, need in peaks.items()}
    counted = waits.counts.items()
    busy = sum(n * costs.seconds[i] * (1.0 - costs.beside[i]) for i, n in counted if waits.labels[i][1].kind in COMPUTE)
    sent = sum(times * costs.moved[label] for label, times in waits.counts.items())
    metrics = Metrics(
        iteration_s=iteration_s,
        throughput_samples_per_s=program.num_samples / count / iteration_s if iteration_s else 0.0,
        bubble_fraction=max(0.0, 1.0 - busy / count / (len(program.actions) * iteration_s)) if iteration_s else 0.0,
        peak_memory_bytes=memory,
        communication_bytes=round(sent / count),
        max_in_flight_samples=held,
        weight_versions={s: problem.regime.weights.copies(plan.position(s)) for s in range(len(plan.stages))},
        staleness={s: problem.regime.weights.staleness(plan.position(s)) for s in range(len(plan.stages))},
    )
    return Timeline(
        source="predicted",
        metrics=metrics,
        events=tuple(events),
        steps=SHOWN if count > 1 else 1,
        memory=_stage_memory(plan, problem) if record else (),
    )


def _stage_memory(plan: Plan, problem: Problem) -> tuple[StageMemory, ...]:
    """The memory of each stage, and the seconds that its backward takes for computing again."""
    bills, keeping = plan.bills(problem), plan.keeping
    without = bills if keeping is plan else keeping.bills(problem)
    return tuple(
        StageMemory(
            static_bytes=bill.static_bytes + bill.version_bytes,
            microbatch_bytes=bill.microbatch_bytes,
            moved_bytes=bill.moved_bytes,
            transient_bytes=bill.transient_bytes,
            late_bytes=bill.late_bytes,
            again_s=bill.backward_s - other.backward_s,
        )
        for bill, other in zip(bills, without, strict=True)
    )


def steady_period(updated: Mapping[int, Sequence[float]], plan: Plan) -> tuple[float, float]:
    """A pipeline that does not drain: when its last whole mini-batch of the steady state begins, and the seconds of one.

    Neither the first mini-batches are counted nor the last ones, of which a stage has only backwards left. It is the slowest
    stage's pace, or the slowest round trip's; others are ahead of it for a while, by what is in flight, or for good.

    Args:
        updated: stage -> when each of its updates ended.
    """
    places = {s: plan.position(s) for s in updated}
    drain = max(-(-place.warmup // place.accumulation) for place in places.values())
    trip = max(place.warmup for place in places.values()) + 1
    stop = min(map(len, updated.values()), default=0) - 1 - drain
    if (pace := repeating([[ends[j] for ends in updated.values()] for j in range(stop + 1)], trip)) is not None:
        return max((ends[stop - 1] for ends in updated.values()), default=0.0), pace
    begin, period = 0.0, 0.0
    # Measured times never repeat themselves. Over as many micro-batches as are in flight a round trip does.
    span = max(max(-(-(place.warmup + 1) // place.accumulation) for place in places.values()), 2)
    for s, ends in updated.items():
        last = len(ends) - 1 - -(-places[s].warmup // places[s].accumulation)
        first = max(last - span, 0)
        if last <= first:
            continue  # too few to say anything
        pace = (ends[last] - ends[first]) / (last - first)
        begin, period = (ends[max(len(ends) - 2 - drain, 0)], pace) if pace > period else (begin, period)
    return begin, period


def update_ends(events: Iterable[Event], plan: Plan) -> dict[int, list[float]]:
    """Stage -> when its updates ended, by its first device."""
    out: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.kind in UPDATES and event.device == plan.stages[event.stage].devices[0]:
            out[event.stage].append(event.end_s)
    return {stage: sorted(ends) for stage, ends in out.items()}


def within(events: Iterable[Event], begin: float, period: float) -> list[Event]:
    """The events that begin in [begin, begin + period), with `begin` as the zero of time. Rounding does not move one out."""
    low, high = begin - STEADY * period, begin + (1.0 - STEADY) * period
    return [e._replace(start_s=e.start_s - begin, end_s=e.end_s - begin) for e in events if low <= e.start_s < high]


def max_in_flight(program: Program, plan: Plan) -> dict[int, int]:
    """Largest number of samples held in full at each stage; without backwards, one micro-batch.

    Of replicas with micro-batches of their own (`Stage.stride`), the sum of what each holds at most.
    """
    change = {kind: row.holds - row.returns for kind, row in KINDS.items() if kind in COMPUTE and row.holds != row.returns}
    out: dict[int, int] = {}
    for s, stage in enumerate(plan.stages):
        own = [change[action[0]] for action in program.actions[stage.devices[0]] if action[1] == s and action[0] in change]
        out[s] = (max(accumulate(own)) if -1 in own else 1) * stage.unit
    return out


class Costs(NamedTuple):
    """The seconds and bytes of a program's actions.

    Args:
        seconds: for each label of the program's waits.
        num_bytes: bytes of the message, of the sum, or of the copy.
        moved: bytes that it puts on links; a ring moves 2(n-1)/n of a sum's over each of the n members' links.
        late: by channel, seconds from the wire to the arrival; 0 for copies.
        beside: share of a pass that is none of its operators', but messages and the runtime's own; 0 for all else.
    """

    seconds: list[float]
    num_bytes: list[float]
    moved: list[float]
    late: list[float]
    beside: list[float]

    @classmethod
    def of(cls, program: Program, plan: Plan, problem: Problem) -> Costs:
        """The costs of a program by the cost model.

        Raises:
            MalformedProgram: the program cannot run to its end, or holds what the plan does not know.
        """
        waits, rates = program.waits, message_rates(plan, problem.graph)
        groups = reduce_groups(plan, problem.graph)
        seconds: list[float] = []
        num_bytes: list[float] = []
        moved: list[float] = []
        besides: list[float] = []
        bills, ways = plan.bills(problem), plan.beside_s(problem)
        copies, added = copy_costs(plan, problem.graph, problem.cluster, bills), lowerings(plan)
        for device, action in waits.labels:
            row, s = KINDS[action.kind], action.stage
            size, share, beside_s, part = 0.0, 1.0, 0.0, part_of(added, plan, device, action) if added else WHOLE
            if row.role is Role.COMPUTE:
                b = plan.stages[s].microbatch_size
                took = pass_seconds(bills[s], last=(action.microbatch + 1) * b > program.num_samples)[action.kind]
                took *= part.of_samples
                beside_s = {FORWARD: ways[s][0], BACKWARD: ways[s][1]}.get(row.direction, 0.0)
            elif row.role is Role.SEND:
                # What a device hands to itself stays in memory.
                size = message_bytes(rates, action, part) if action.peer_device != device else 0.0
                took = size / problem.cluster.link(device, action.peer_device).bandwidth_bytes_per_s if size else 0.0
            elif row.role is Role.SUM:
                size, members = _summed(program, groups, problem, device, action)
                took, share = problem.cluster.allreduce_s(size, members), 2 * (len(members) - 1) / len(members)
            elif row.role is Role.UPDATE:
                took = bills[s].update_s if device in plan.stages[s].devices else 0.0
            elif row.role is Role.COPY and (row.occupies, s) in copies:
                b = plan.stages[s].microbatch_size
                took, size = copies[row.occupies, s].of(last=(action.microbatch + 1) * b > program.num_samples)
                share = 0.0  # the host is none of the devices that communicate
            else:
                raise MalformedProgram(f"{action.text(device)} takes no time that a simulation could know")
            seconds.append(took)
            num_bytes.append(size)
            moved.append(size * share)
            besides.append(beside_s / took if took else 0.0)
        late = [0.0] * (waits.num_resources - len(waits.devices))
        for (_, _, _, src, dst), ends in waits.channels.items():
            late[ends.resource - len(waits.devices)] = 0.0 if src == dst else problem.cluster.link(src, dst).latency_s
        return cls(seconds, num_bytes, moved, late, besides)


def _summed(
    program: Program, groups: Sequence[ReduceGroup], problem: Problem, device: int, action: Action
) -> tuple[float, tuple[int, ...]]:
    """The bytes that a sum adds up, and its members."""
    if KINDS[action.kind].everyone:
        return NORM_BYTES, program.waits.devices
    if not 0 <= action.microbatch < len(groups):
        raise MalformedProgram(f"{action.text(device)}: the plan has {len(groups)} gradient groups")
    group = groups[action.microbatch]
    return group.num_bytes(problem.graph), group.devices


def _events(program: Program, costs: Costs, times: Times, zero: float) -> list[Event]:
    """The events of a run, with `zero` as the zero of time. A pass's event is its computation, as in a measured timeline."""
    waits, num_bytes = program.waits, [round(size) for size in costs.num_bytes]
    begin, end, labels = times.begin_s, times.end_s, waits.label_of
    out: list[Event] = []
    for device in waits.devices:
        for node, action in enumerate(program.actions[device], start=waits.first[device]):
            kind, stage, microbatch, _, peer_device, _, _ = action
            if kind not in RECEIVES and peer_device != device:
                start, stop, label = begin[node], end[node], labels[node]
                stop -= (stop - start) * costs.beside[label] if costs.beside[label] else 0.0
                start, stop = (start, stop) if not zero else (start - zero, stop - zero)
                out.append(Event(device, kind, stage, microbatch, start, stop, num_bytes[label]))
    return out
