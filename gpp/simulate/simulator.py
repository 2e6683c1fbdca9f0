"""Discrete-event run of a program on a cost model.

Every device walks its static list. A compute action starts when the device is free and its messages
have arrived; a send leaves at once on its own first-in-first-out channel and overlaps with compute; a
reduction starts when all its devices have reached it. Channels do not contend with each other.
The order of every device is static, so the times are a longest path: no event queue is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gpp.cost.problem import Problem
from gpp.errors import MalformedProgram
from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.program.program import NORM_BYTES, WORLD, Program, ReduceGroup, reduce_groups
from gpp.timeline import Event, Metrics, Timeline

ORDER_BYTES = 1
"""Payload of an order-only edge: one byte, whatever the number of samples."""


SHOWN = 3
"""Mini-batches that the timeline of a pipeline which does not drain shows: its pattern may take more than one to repeat."""

STEADY = 1e-9
"""Share of a period by which rounding may move an event."""


def simulate(program: Program, plan: Plan, problem: Problem, *, record: bool = True) -> Timeline:
    """The timeline of one training step; of a program that does not drain, of `SHOWN` mini-batches in its steady state.

    Args:
        record: keep the events; a planner that scores candidates needs only the metrics.

    Raises:
        MalformedProgram: the program cannot run to its end.
    """
    run = _Run(program, plan, problem, record)
    run.advance_all()
    iteration_s, events, count = max(run.clock.values(), default=0.0), run.events, program.minibatches
    if count > 1:
        begin, iteration_s = steady_period(run.updated, plan)
        events = within(events, begin, SHOWN * iteration_s)
    held = max_in_flight(program, plan)
    kept = {s: max(held[s], stage.microbatch_size) for s, stage in enumerate(plan.stages)}
    memory = {device: round(need) for device, need in plan.device_memory(problem, kept).items()}
    busy = sum(run.busy.values()) / count
    metrics = Metrics(
        iteration_s=iteration_s,
        throughput_samples_per_s=program.num_samples / count / iteration_s if iteration_s else 0.0,
        bubble_fraction=max(0.0, 1.0 - busy / (len(program.actions) * iteration_s)) if iteration_s else 0.0,
        peak_memory_bytes=memory,
        communication_bytes=round(run.sent_bytes / count),
        max_in_flight_samples=held,
        weight_versions={s: problem.regime.weights.copies(plan.position(s)) for s in range(len(plan.stages))},
        staleness={s: problem.regime.weights.staleness(plan.position(s)) for s in range(len(plan.stages))},
    )
    return Timeline(source="predicted", metrics=metrics, events=tuple(events), steps=SHOWN if count > 1 else 1)


def steady_period(updated: Mapping[int, Sequence[float]], plan: Plan) -> tuple[float, float]:
    """Of a pipeline that does not drain: when its last whole mini-batch in the steady state begins, and seconds of one.

    The slowest stage's, or the slowest round trip's, from the start; the others are ahead of it for a while, by what is in flight.
    Neither are the last mini-batches counted, of which a stage has only backwards left.

    Args:
        updated: stage -> when each of its updates ended.
    """
    begin, period = 0.0, 0.0
    places = {s: plan.position(s) for s in updated}
    # Over as many micro-batches as are in flight a round trip repeats itself.
    span = max(max(-(-(place.warmup + 1) // place.accumulation) for place in places.values()), 2)
    drain = max(-(-place.warmup // place.accumulation) for place in places.values())
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
        if event.kind == "U" and event.device == plan.stages[event.stage].devices[0]:
            out[event.stage].append(event.end_s)
    return {stage: sorted(ends) for stage, ends in out.items()}


def within(events: Iterable[Event], begin: float, period: float) -> list[Event]:
    """Those that begin in [begin, begin + period), as if `begin` were the zero of time; rounding does not move one out."""
    low, high = begin - STEADY * period, begin + (1.0 - STEADY) * period
    return [e._replace(start_s=e.start_s - begin, end_s=e.end_s - begin) for e in events if low <= e.start_s < high]


def max_in_flight(program: Program, plan: Plan) -> dict[int, int]:
    """Largest number of samples between forward and backward at each stage; without backwards, one micro-batch.

    Of replicas that take turns, the sum of what each holds at most.
    """
    out: dict[int, int] = {}
    for s, stage in enumerate(plan.stages):
        held = most = 0
        keeps = False
        for action in program.actions[stage.devices[0]]:
            if action.stage != s:
                continue
            if action.kind == "F":
                held += 1
                most = max(most, held)
            elif action.kind == "B":
                held, keeps = held - 1, True
        out[s] = (most if keeps else 1) * stage.microbatch_size * stage.round_robin_degree
    return out


def message_rates(plan: Plan, graph: OpGraph) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(direction, source stage, destination stage) -> bytes for each sample, bytes for each message."""
    out = {}
    for (s, t), tensors in plan.edge_tensors(graph).items():
        fixed = 0.0 if tensors else float(ORDER_BYTES)
        out["F", s, t] = (sum(x.bytes_per_sample for x in tensors), fixed)
        out["B", t, s] = (sum(x.bytes_per_sample for x in tensors if x.differentiable), fixed)
    return out


class _Run:
    """State of one simulation; mutable and private to `simulate`."""

    def __init__(self, program: Program, plan: Plan, problem: Problem, record: bool) -> None:
        self.program, self.plan, self.problem, self.record = program, plan, problem, record
        self.groups: tuple[ReduceGroup, ...] = reduce_groups(plan, problem.graph)
        self.group_s = [self._group_s(group) for group in self.groups]
        self.norm_s = problem.cluster.allreduce_s(NORM_BYTES, tuple(sorted(program.actions)))
        bills = plan.bills(problem)
        self.duration = {s: {"F": bill.forward_s, "B": bill.backward_s} for s, bill in enumerate(bills)}
        # The last micro-batch is smaller where the size does not divide the mini-batch: (stage, micro-batch) -> durations.
        self.shorter = {
            (s, program.num_samples // stage.microbatch_size): {"F": bill.last_forward_s, "B": bill.last_backward_s}
            for s, (stage, bill) in enumerate(zip(plan.stages, bills, strict=True))
            if program.num_samples % stage.microbatch_size
        }
        self.update_s = {s: bill.update_s for s, bill in enumerate(bills)}
        self.updated: dict[int, list[float]] = defaultdict(list)  # stage -> when each of its updates ended
        self.rate = message_rates(plan, problem.graph)
        self.clock = dict.fromkeys(program.actions, 0.0)
        self.busy = dict.fromkeys(program.actions, 0.0)
        self.position = dict.fromkeys(program.actions, 0)
        self.arrival: dict[tuple[str, int, int, int, int, int], float] = {}
        self.channel_free: dict[tuple[str, int, int, int, int], float] = defaultdict(float)
        self.needs: dict[tuple[int, str, int, int], list[tuple[str, int, int, int, int, int]]] = {}
        self.waiting: dict[object, int] = {}
        # (group, which of its sums) -> device -> when it came; and which one a device is at.
        self.reached: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self.sums_done: dict[tuple[int, int], int] = defaultdict(int)
        self.events: list[Event] = []
        self.sent_bytes = 0.0

    def _group_s(self, group: ReduceGroup) -> float:
        return self.problem.cluster.allreduce_s(group.num_bytes(self.problem.graph), group.devices)

    def advance_all(self) -> None:
        ready = sorted(self.program.actions, reverse=True)
        while ready:
            self._advance(ready.pop(), ready)
        stuck = {d: a[self.position[d]] for d, a in self.program.actions.items() if self.position[d] < len(a)}
        if stuck:
            raise MalformedProgram(
                "the program cannot run to its end; blocked: " + ", ".join(action.text(d) for d, action in sorted(stuck.items()))
            )

    def _advance(self, device: int, ready: list[int]) -> None:
        """Run one device until it blocks or ends; wake those who waited for what it sent."""
        actions, at, now = self.program.actions[device], self.position[device], self.clock[device]
        arrival, needs, waiting, record, link_of = self.arrival, self.needs, self.waiting, self.record, self.problem.cluster.link
        duration, shorter = self.duration, self.shorter
        count = len(actions)
        while at < count:
            action = actions[at]
            kind, stage, microbatch, peer_stage, peer_device, lo, hi = action
            if kind == "RF" or kind == "RB":
                needs.setdefault((device, kind[1], stage, microbatch), []).append(
                    (kind[1], peer_stage, stage, peer_device, device, lo)
                )
            elif kind == "F" or kind == "B":
                start, keys = now, needs.get((device, kind, stage, microbatch))
                if keys:
                    missing = None
                    for key in keys:
                        when = arrival.get(key)
                        if when is None:
                            missing = key
                            break
                        if when > start:
                            start = when
                    if missing:
                        waiting[missing] = device
                        break
                took = shorter.get((stage, microbatch), duration[stage]) if shorter else duration[stage]
                now = start + took[kind]
                self.busy[device] += now - start
                if record:
                    self.events.append(Event(device, kind, stage, microbatch, start, now))
            elif kind == "SF" or kind == "SB":
                if peer_device == device:
                    # Handed over in memory, to a stage that this same device runs later.
                    arrival[kind[1], stage, peer_stage, device, device, lo] = now
                    at += 1
                    continue
                per_sample, fixed = self.rate[kind[1], stage, peer_stage]
                num_bytes = per_sample * (hi - lo) + fixed
                channel = (kind[1], stage, peer_stage, device, peer_device)
                link = link_of(device, peer_device)
                start = max(now, self.channel_free[channel])
                free = start + num_bytes / link.bandwidth_bytes_per_s
                self.channel_free[channel] = free
                key = (*channel, lo)
                arrival[key] = free + link.latency_s
                self.sent_bytes += num_bytes
                if record:
                    self.events.append(Event(device, kind, stage, microbatch, start, free + link.latency_s, round(num_bytes)))
                if key in waiting:
                    ready.append(waiting.pop(key))
            elif kind == "R" or kind == "N":
                done = self._reduce(device, WORLD if kind == "N" else microbatch, now, ready)
                if done is None:
                    break
                if record:
                    num_bytes = NORM_BYTES if kind == "N" else self._group_bytes(microbatch)
                    self.events.append(Event(device, kind, stage, microbatch, now, done, num_bytes))
                now = done
            else:
                if record:
                    self.events.append(Event(device, kind, stage, microbatch, now, now + self.update_s[stage]))
                now += self.update_s[stage]
                if device == self.plan.stages[stage].devices[0]:
                    self.updated[stage].append(now)
            at += 1
        self.position[device], self.clock[device] = at, now

    def _group_bytes(self, group: int) -> int:
        return round(self.groups[group].num_bytes(self.problem.graph))

    def _reduce(self, device: int, group: int, now: float, ready: list[int]) -> float | None:
        """End of a reduction, or None while a member is still on its way there."""
        reached = self.reached[group, self.sums_done[device, group]]
        members = self.program.actions if group == WORLD else self.groups[group].devices
        if device not in reached:
            reached[device] = now
            n = len(members)
            # A ring moves 2(n-1)/n of the bytes over each member's link.
            self.sent_bytes += (NORM_BYTES if group == WORLD else self._group_bytes(group)) * 2 * (n - 1) / n
            if len(reached) == n:
                ready += [member for member in reached if member != device]
        if len(reached) < len(members):
            return None
        self.sums_done[device, group] += 1
        return max(reached.values()) + (self.norm_s if group == WORLD else self.group_s[group])
