"""The simulator's metrics for a plan of equal micro-batches, without building its program.

Planners score many candidates. Three things make this some ten to hundred times faster than
`gpp.simulate.simulator.simulate` on the program, and none of them changes the result (a test holds the two equal):

* when every stage has the same micro-batch size and warms up, then alternates one backward and one forward (GPipe is the case
  of a warm-up as long as the mini-batch), round m of all stages is B_m and the forward before it: a recurrence over rounds;
* replicas whose messages are alike have one timeline, so one of them is walked for all (`_classes`);
* the recurrence is max-plus linear: once a whole state is the state before plus a constant, it stays so, and the
  rounds up to the drain are skipped (Baccelli et al., "Synchronization and Linearity", 1992, chapter 3). The same holds for
  whole steps: `gpp.simulate.period`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from gpp.cost.problem import Problem
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, Direction
from gpp.program.program import NORM_BYTES, ReduceGroup, reduce_groups
from gpp.routing import copies, messages
from gpp.simulate.messages import message_rates
from gpp.simulate.period import Period, spans
from gpp.timeline import Metrics, Timeline

STEADY = 1e-9
"""Relative difference between a round's length and the one before at which they count as equal."""


STREAM = 8
"""Warm-ups that a pipeline which does not drain is run for, and again for as many, to see its steady pace."""


def can_score(plan: Plan, warmups: list[int | None]) -> bool:
    """Whether all stages have devices of their own, no copies to the host, one micro-batch size that divides the mini-batch, no
    actions of mechanisms, and a covering warm-up.

    A warm-up covers if it is at least as long as those of the successors. Replicas that take turns are at different
    micro-batches at a time, so there are no rounds that all stages share.

    Args:
        warmups: forwards of each stage before its first backward; None for an order of another form.
    """
    sizes = {stage.microbatch_size for stage in plan.stages}
    if plan.shares_devices or len(sizes) > 1 or plan.minibatch_size % sizes.pop() or any(w is None for w in warmups):
        return False
    if any(stage.round_robin_degree > 1 for stage in plan.stages):
        return False
    if any(value.acts for stage in plan.stages for value in stage.mechanisms):
        return False
    return all((warmups[s] or 0) >= (warmups[t] or 0) for s, t in plan.edges)


def score(plan: Plan, problem: Problem, warmups: list[int], *, drains: bool = True) -> Timeline:
    """Metrics of one training step; no events.

    Args:
        warmups: forwards of each stage before its first backward, as its schedule has it; see `can_score`.
        drains: whether the pipeline is empty between two mini-batches; else a step is one mini-batch of the steady state. Then the
            time of an update is spread over the backwards of its mini-batch, which is exact where there is only one.
    """
    stages, b = plan.stages, plan.stages[0].microbatch_size
    count = plan.minibatch_size // b
    devices = [device for stage in stages for device in stage.devices]
    incoming, sent = _channels(plan, problem, b, {device: i for i, device in enumerate(devices)})
    bills, holds = plan.bills(problem), problem.regime.holds
    duration = [(bill.forward_s, bill.backward_s) for bill in bills]
    # What nobody waits for: the second half of a backward that is split, of a micro-batch that came earlier by so many.
    second = [
        (bill.weight_s, plan.late(s, holds)) if holds.splits and plan.has_weight_gradients(s, problem.graph) else (0.0, 0)
        for s, bill in enumerate(bills)
    ]
    groups = reduce_groups(plan, problem.graph)
    sums: dict[int, tuple[int, ...]] = dict.fromkeys(devices, ())
    for g, group in enumerate(groups):
        for device in group.devices:
            sums[device] += (g,)
    # Devices that sum with the same others at the end of a step begin the next one alike.
    alike = {key: i for i, key in enumerate(dict.fromkeys((plan.stage_of_device[device], sums[device]) for device in devices))}
    first_of = [alike[plan.stage_of_device[device], sums[device]] for device in devices]
    classes, members = _classes([plan.stage_of_device[device] for device in devices], first_of, incoming)
    channels = [found for _, found in members]
    if drains:
        rows = [(bills[s].forward_s, bills[s].backward_s - second[s][0], warmups[s], *second[s]) for s, _ in members]
        class_of = dict(zip(devices, classes, strict=True))
        finish = _Finish(plan, problem, groups, class_of)
        end, reduced = _period(rows, channels, count, finish), finish.moved
    else:
        after, reduced = _updates(plan, problem)
        rows = [(*duration[s], warmups[s], after[s] / count, 0) for s, _ in members]
        first = STREAM * max(warmups)
        early, late = (max(_run(rows, channels, n).clock) for n in (first, 2 * first))
        end = (late - early) / first * count
    beside = plan.beside_s(problem)
    busy = sum(
        count * (sum(pair) - sum(own)) * len(stage.devices) for pair, own, stage in zip(duration, beside, stages, strict=True)
    )
    most = count if drains else max(warmups)
    held = {s: min(warmup, most) * b if plan.runs_backward(s, problem.graph) else b for s, warmup in enumerate(warmups)}
    memory = {device: round(need) for device, need in plan.device_memory(problem, held).items()}
    return Timeline(
        source="predicted",
        metrics=Metrics(
            iteration_s=end,
            throughput_samples_per_s=plan.minibatch_size / end if end else 0.0,
            bubble_fraction=max(0.0, 1.0 - busy / (plan.num_devices * end)) if end else 0.0,
            peak_memory_bytes=memory,
            communication_bytes=round(sent * count + reduced),
            max_in_flight_samples=held,
            weight_versions={s: problem.regime.weights.copies(plan.position(s)) for s in range(len(stages))},
            staleness={s: problem.regime.weights.staleness(plan.position(s)) for s in range(len(stages))},
        ),
    )


Channels = dict[Direction, list[tuple[int, float, float]]]
"""For each direction: (source, seconds on the wire, latency) of each channel on which one message a micro-batch arrives."""


def _channels(plan: Plan, problem: Problem, b: int, index: dict[int, int]) -> tuple[list[Channels], float]:
    """Channels by destination device, and the bytes of one micro-batch."""
    out: list[Channels] = [{FORWARD: [], BACKWARD: []} for _ in index]
    total = 0.0
    group_of = {replica[0]: replica for stage in plan.stages for replica in stage.replicas}
    cut = [stage.pieces(b) for stage in plan.stages]
    returning, rates = plan.returning(problem.graph), message_rates(plan, problem.graph)
    for s, t in plan.edges:
        (forward, fixed), (backward, _) = rates[FORWARD, s, t], rates[BACKWARD, t, s]
        for route in messages(cut[s], cut[t]):
            makers, readers = group_of[route.src_device], group_of[route.dst_device]
            size = forward * (route.hi - route.lo) + fixed
            for src, dst in copies(makers, readers):
                link = problem.cluster.link(src, dst)
                out[index[dst]][FORWARD].append((index[src], size / link.bandwidth_bytes_per_s, link.latency_s))
                total += size
            size = backward * (route.hi - route.lo) + fixed
            for dst, src in copies(readers, makers) if (s, t) in returning else ():
                link = problem.cluster.link(src, dst)
                out[index[src]][BACKWARD].append((index[dst], size / link.bandwidth_bytes_per_s, link.latency_s))
                total += size
    return out, total


def _classes(stage_of: list[int], first: list[int], incoming: list[Channels]) -> tuple[list[int], list[tuple[int, Channels]]]:
    """Classes of devices with equal timelines: the class of each device; the stage and the incoming channels of each class.

    Devices of one first class are told apart by where their messages come from, until nothing changes. Classes are numbered in
    stage order.

    Args:
        first: the class that each device is in at first; numbered in stage order, never over two stages.
    """
    classes = list(first)
    num_classes = len(set(classes))
    while True:
        keys = [
            (
                classes[d],
                *(tuple(sorted({(classes[src], wire, late) for src, wire, late in channels[way]})) for way in (FORWARD, BACKWARD)),
            )
            for d, channels in enumerate(incoming)
        ]
        numbers = {key: i for i, key in enumerate(sorted(set(keys)))}
        if len(numbers) == num_classes:
            # Unchanged: the keys speak of the classes as they are.
            one_of = {c: d for d, c in reversed(list(enumerate(classes)))}
            rename = {c: i for i, c in enumerate(sorted(one_of))}
            members = [
                (
                    stage_of[one_of[c]],
                    {
                        way: sorted({(rename[classes[src]], wire, late) for src, wire, late in incoming[one_of[c]][way]})
                        for way in (FORWARD, BACKWARD)
                    },
                )
                for c in sorted(one_of)
            ]
            return [rename[c] for c in classes], members
        classes, num_classes = [numbers[key] for key in keys], len(numbers)


def _period(rows: list[Row], channels: list[Channels], count: int, finish: _Finish) -> float:
    """Seconds that a further step adds, as `gpp.simulate.period` has it."""
    period, clock, wires = Period(), [0.0] * len(rows), None
    before = [0.0] * (len(rows) + sum(map(len, (found for each in channels for found in each.values()))))
    while True:
        step = _run(rows, channels, count, clock, wires)
        clock, wires = finish.after(step.clock), step.wires
        free = [*clock, *wires]
        found = period.after(spans(before, [*step.first, *step.sent], free, max(clock)))
        if found is not None:
            return found
        before = free


Row = tuple[float, float, int, float, int]
"""Of a class: seconds of a forward, of a backward, warm-up, seconds after each backward that nobody waits for, and from which
backward on; those that the first ones lack follow the last."""


class _Step(NamedTuple):
    """A step of all classes.

    Args:
        clock: when each class has done its passes.
        first: when it began the first of them.
        wires: when each channel is free again: those of forwards by class, then those of backwards.
        sent: when each of them was first used.
    """

    clock: list[float]
    first: list[float]
    wires: list[float]
    sent: list[float]


def _run(
    stages: list[Row], incoming: list[Channels], count: int, start: list[float] | None = None, held: list[float] | None = None
) -> _Step:
    """One step.

    Args:
        stages: in a topological order.
        count: micro-batches.
        start, held: when each class may begin, and until when each channel is taken; None: 0.
    """
    n = len(stages)
    warmup = [min(w, count) for _, _, w, _, _ in stages]
    forwards, backwards, wires = _wires(incoming, held or [])
    done: list[list[float]] = [[] for _ in range(n)]  # ends of the forwards, from micro-batch `base` on
    clock, last, base = start[:] if start else [0.0] * n, [0.0] * n, 0
    for c in range(n):
        took, now, mine = stages[c][0], clock[c], done[c]
        sources = [(channel, done[channel[0]]) for channel in forwards[c]]
        for m in range(warmup[c]):
            for channel, ends in sources:
                left, free = ends[m], channel[3]
                channel[3] = free = (left if left > free else free) + channel[1]
                if free + channel[2] > now:
                    now = free + channel[2]
            now += took
            mine.append(now)
        clock[c] = now
    begun = [mine[0] for mine in done]
    returned = begun
    longest, shortest = max(warmup), min(warmup)
    window = longest - shortest + 2  # of the forwards that later rounds may read
    ahead = [(c, stages[c][0], warmup[c] - 1, forwards[c]) for c in range(n)]
    back = [(c, stages[c][1], stages[c][3], stages[c][4], backwards[c]) for c in reversed(range(n))]
    settled = max(late for *_, late in stages)
    m, steady, length = 0, 0, 0.0
    while m < count:
        before, free_before = last[:], [channel[3] for channel in wires] if m + longest <= count else []
        for c, took, more, channels in ahead if m else ():
            x = m + more
            if x < count:
                now, x = clock[c], x - base
                for channel in channels:
                    left, free = done[channel[0]][x], channel[3]
                    channel[3] = free = (left if left > free else free) + channel[1]
                    if free + channel[2] > now:
                        now = free + channel[2]
                clock[c] = now = now + took
                done[c].append(now)
        for c, took, after, late, channels in back:
            now = clock[c]
            for channel in channels:
                left, free = last[channel[0]], channel[3]
                channel[3] = free = (left if left > free else free) + channel[1]
                if free + channel[2] > now:
                    now = free + channel[2]
            last[c] = now = now + took
            clock[c] = now + after if m >= late else now
        if not m:
            returned = last[:]
        if m > settled and free_before:
            step = last[0] - before[0]
            same = _near(step, length) and _grew(step, last, before, done, wires, free_before)
            steady, length = steady + 1 if same else 0, step
            skip = count - longest - m
            if steady > window and skip > 0:
                oldest = m + shortest - base
                m, base = m + skip, m + shortest + skip
                clock = [t + skip * step for t in clock]
                last = [t + skip * step for t in last]
                done = [[t + skip * step for t in mine[oldest:]] for mine in done]
                for channel in wires:
                    channel[3] += skip * step
        m += 1
    for c, (*_, after, late) in enumerate(stages):
        clock[c] += after * min(late, count)
    made = [begun[c[0]] for channels in forwards for c in channels] + [returned[c[0]] for channels in backwards for c in channels]
    sent = [max(when, until) for when, until in zip(made, held or [0.0] * len(made), strict=True)]
    first = [when - row[0] for when, row in zip(begun, stages, strict=True)]
    return _Step(clock, first, [channel[3] for channel in wires], sent)


def _near(step: float, other: float) -> bool:
    return abs(other - step) < STEADY * step


def _grew(
    step: float, last: list[float], before: list[float], done: list[list[float]], wires: list[Wire], free_before: list[float]
) -> bool:
    """Whether a round made every time of the state later by `step`."""
    return (
        all(_near(step, a - b) for a, b in zip(last, before, strict=True))
        and all(_near(step, mine[-1] - mine[-2]) for mine in done)
        and all(_near(step, channel[3] - b) for channel, b in zip(wires, free_before, strict=True))
    )


Wire = list[Any]
"""A channel: its source, seconds on the wire, latency, and when the wire is free again."""


def _wires(incoming: list[Channels], held: list[float]) -> tuple[list[list[Wire]], list[list[Wire]], list[Wire]]:
    """The channels of forwards and of backwards by class, and all of them. `held` says until when each is taken."""
    into = [[[[src, wire, late, 0.0] for src, wire, late in each[way]] for each in incoming] for way in (FORWARD, BACKWARD)]
    wires = [channel for way in into for channels in way for channel in channels]
    for channel, when in zip(wires, held, strict=False):
        channel[3] = when
    return into[0], into[1], wires


def _updates(plan: Plan, problem: Problem) -> tuple[list[float], float]:
    """For a pipeline that does not drain: seconds that each stage's sums and update take, and bytes that the sums move."""
    out, moved = [bill.update_s for bill in plan.bills(problem)], 0.0
    for group in reduce_groups(plan, problem.graph):
        num_bytes = group.num_bytes(problem.graph)
        took = problem.cluster.allreduce_s(num_bytes, group.devices)
        for s in {plan.stage_of_device[device] for device in group.devices}:
            out[s] += took
        moved += num_bytes * 2 * (len(group.devices) - 1)
    return out, moved


@final
class _Finish:
    """The end of a step, after its last backward: reductions, the sum of the norm, updates.

    Args:
        class_of: device -> class; those of a class are in the same groups.
    """

    def __init__(self, plan: Plan, problem: Problem, groups: Sequence[ReduceGroup], class_of: Mapping[int, int]) -> None:
        self.moved = 0.0
        self.sums: list[tuple[tuple[int, ...], float]] = []
        for group in groups:
            num_bytes = group.num_bytes(problem.graph)
            members = tuple(sorted({class_of[device] for device in group.devices}))
            self.sums.append((members, problem.cluster.allreduce_s(num_bytes, group.devices)))
            self.moved += num_bytes * 2 * (len(group.devices) - 1)
        if problem.global_norm:
            self.sums.append(
                (tuple(sorted(set(class_of.values()))), problem.cluster.allreduce_s(NORM_BYTES, tuple(sorted(class_of))))
            )
            self.moved += NORM_BYTES * 2 * (len(class_of) - 1)
        update = [bill.update_s for bill in plan.bills(problem)]
        self.update_s = {class_of[device]: update[s] for device, s in plan.stage_of_device.items()}

    def after(self, clock: Sequence[float]) -> list[float]:
        """The time at which each class has done all of a step, given when it has done its passes."""
        done = list(clock)
        for members, took in self.sums:
            end = max(done[c] for c in members) + took
            for c in members:
                done[c] = end
        return [when + self.update_s[c] for c, when in enumerate(done)]
