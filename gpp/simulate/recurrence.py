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

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, final

from gpp.compiled import reals
from gpp.cost.problem import Problem
from gpp.plan.messages import device_messages
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, FORWARD, Direction
from gpp.program.program import NORM_BYTES, reduce_groups
from gpp.simulate.longest_path import MEETING, Step, Times, repeated, walked
from gpp.simulate.messages import message_rates
from gpp.simulate.period import repeating
from gpp.simulate.walk import Walk, grown
from gpp.timeline import Metrics, Timeline

STEADY = 1e-9
"""Relative difference between a round's length and the one before at which they count as equal."""


STREAM = 24
"""Warm-ups for which a pipeline that does not drain is walked at most until it repeats itself."""

ENDLESS = 1 << 40
"""Micro-batches of a pipeline that does not drain."""


def can_score(plan: Plan, warmups: list[int | None]) -> bool:
    """Whether all stages have devices of their own, no copies to the host, one micro-batch size that divides the mini-batch, no
    value of a mechanism that acts, and a covering warm-up. Split backwards are covered.

    A warm-up covers if it is at least as long as those of the successors. Replicas with micro-batches of their own are at
    different ones at a time, so there are no rounds that all stages share.

    Args:
        warmups: forwards of each stage before its first backward; None for an order of another form.
    """
    sizes = {stage.microbatch_size for stage in plan.stages}
    if plan.shares_devices or len(sizes) > 1 or plan.minibatch_size % sizes.pop() or any(w is None for w in warmups):
        return False
    if any(stage.stride > 1 for stage in plan.stages):
        return False
    if any(value.acts for stage in plan.stages for value in stage.mechanisms):
        return False
    return all((warmups[s] or 0) >= (warmups[t] or 0) for s, t in plan.edges)


def score(plan: Plan, problem: Problem, warmups: list[int], *, drains: bool = True) -> Timeline:
    """Metrics of one training step; no events.

    Args:
        warmups: forwards of each stage before its first backward, as its schedule has it; see `can_score`.
        drains: whether the pipeline is empty between two mini-batches; else a step is one mini-batch of the steady state.
    """
    stages, b = plan.stages, plan.stages[0].microbatch_size
    count = plan.minibatch_size // b
    devices = [device for stage in stages for device in stage.devices]
    incoming, sent = _channels(plan, problem, b, {device: i for i, device in enumerate(devices)})
    bills, holds = plan.bills(problem), problem.regime.holds
    duration = [(bill.forward_s, bill.backward_s) for bill in bills]
    # What nobody waits for: what a backward leaves for later, of a micro-batch that came earlier by so many.
    second = [
        (bill.weight_s, plan.late(s, holds)) if holds.parts and plan.has_weight_gradients(s, problem.graph) else (0.0, 0)
        for s, bill in enumerate(bills)
    ]
    sums = _sums(plan, problem, drains=drains)
    own: dict[int, tuple[int, ...]] = dict.fromkeys(devices, ())
    for g, each in enumerate(sums):
        for device in each.devices:
            own[device] += (g,)
    # Devices that sum with the same others at the end of a step begin the next one alike.
    alike = {key: i for i, key in enumerate(dict.fromkeys((plan.stage_of_device[device], own[device]) for device in devices))}
    first_of = [alike[plan.stage_of_device[device], own[device]] for device in devices]
    classes, members = _classes([plan.stage_of_device[device] for device in devices], first_of, incoming)
    channels = [found for _, found in members]
    rows = [_ClassPasses(bills[s].forward_s, bills[s].backward_s - second[s][0], warmups[s], *second[s]) for s, _ in members]
    class_of = dict(zip(devices, classes, strict=True))
    rounds = _Rounds(rows, channels, count if drains else ENDLESS)
    for each in sums:
        rounds.meet(sorted({class_of[device] for device in each.devices}), each.seconds)
    rounds.update([bills[s].update_s for s, _ in members])
    end = repeated(rounds.step, [0.0] * rounds.num_resources)[1] if drains else rounds.pace(count)
    beside = plan.beside_s(problem)
    busy = sum(
        count * (sum(pair) - sum(own)) * len(stage.devices) for pair, own, stage in zip(duration, beside, stages, strict=True)
    )
    most = count if drains else max(warmups)
    held = {s: min(warmup, most) * b if plan.runs_backward(s, problem.graph) else b for s, warmup in enumerate(warmups)}
    memory = {device: round(need) for device, need in plan.device_memory(problem, held).items()}
    weights, places = problem.regime.weights, [plan.position(s) for s in range(len(stages))]
    return Timeline(
        source="predicted",
        metrics=Metrics(
            iteration_s=end,
            throughput_samples_per_s=plan.minibatch_size / end if end else 0.0,
            bubble_fraction=max(0.0, 1.0 - busy / (plan.num_devices * end)) if end else 0.0,
            peak_memory_bytes=memory,
            communication_bytes=round(sent * count + sum(each.moved for each in sums)),
            max_in_flight_samples=held,
            weight_versions={s: weights.copies(place) for s, place in enumerate(places)},
            staleness={s: weights.staleness(place) for s, place in enumerate(places)},
        ),
    )


Channels = dict[Direction, list[tuple[int, float, float]]]
"""For each direction: (source, seconds on the wire, latency) of each channel on which one message a micro-batch arrives."""


def _channels(plan: Plan, problem: Problem, b: int, index: dict[int, int]) -> tuple[list[Channels], float]:
    """Channels by destination device, and the bytes of one micro-batch."""
    out: list[Channels] = [{FORWARD: [], BACKWARD: []} for _ in index]
    total = 0.0
    rates = message_rates(plan, problem.graph)
    carried, returning = plan.carried(problem.graph), plan.returning(problem.graph)
    for way, (s, src, _), (t, dst, _), lo, hi in device_messages(plan.stages, carried, returning, b):
        per_sample, fixed = rates[way, s, t]
        size, link = per_sample * (hi - lo) + fixed, problem.cluster.link(src, dst)
        out[index[dst]][way].append((index[src], size / link.bandwidth_bytes_per_s, link.latency_s))
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


class _Sum(NamedTuple):
    """A sum at the end of a step: its members, its seconds, and the bytes that it moves."""

    devices: tuple[int, ...]
    seconds: float
    moved: float


def _sums(plan: Plan, problem: Problem, *, drains: bool) -> list[_Sum]:
    """The sums of gradients, and behind them that of the norm."""
    added = [(group.devices, group.num_bytes(problem.graph)) for group in reduce_groups(plan, problem.graph)]
    if drains and problem.global_norm:
        added.append((tuple(sorted(plan.stage_of_device)), NORM_BYTES))
    cluster = problem.cluster
    return [_Sum(own, cluster.allreduce_s(size, own), size * 2 * (len(own) - 1)) for own, size in added]


class _ClassPasses(NamedTuple):
    """The passes of a class.

    Args:
        after_s: seconds after each backward that nobody waits for, from backward number `late` on; what the first ones lack
            follows the last.
    """

    forward_s: float
    backward_s: float
    warmup: int
    after_s: float
    late: int


@final
class _Rounds:
    """The rounds of all classes as steps of a walk (`gpp.simulate.longest_path`), and a step of the training as many rounds.

    Round m of a class with w forwards ahead is forward m + w - 1 and backward m, where there are such. Two classes, w of 2 and 1:

        round   -1   0      1      2
        c0      F0   F1 B0  F2 B1  B2      c1 needs in each round the forward that c0 has made in the round before
        c1           F0 B0  F1 B1  F2 B2

    So a reader needs what its source has made w(source) - w(reader) rounds before. That of one round before is still in its slot
    where readers go first; what is older is handed on from slot to slot.

    Args:
        rows: the classes, in a topological order.
        count: micro-batches.
    """

    def __init__(self, rows: Sequence[_ClassPasses], channels: Sequence[Channels], count: int) -> None:
        n, warmup = len(rows), [min(row.warmup, count) for row in rows]
        self.rows, self.count, self.warmup = rows, count, warmup
        self.sources = [src for way in (FORWARD, BACKWARD) for each in channels for src, _, _ in each[way]]
        self.num_ahead = sum(len(each[FORWARD]) for each in channels)
        self.num_resources = n + len(self.sources)
        # Slots: forwards, backwards, wires; clocks of the classes; one that nobody reads; arrivals; forwards of earlier rounds.
        self.clocks = 2 * n + len(self.sources)
        self.unread = self.clocks + n
        self._wires = iter(range(2 * n, self.clocks))
        most = [0] * n
        for c, each in enumerate(channels):
            for src, _, _ in each[FORWARD]:
                before = warmup[src] - warmup[c]
                most[src] = max(most[src], before if before > 1 else 0)
        earlier = list(accumulate(most, initial=self.unread + 1 + len(self.sources)))
        self.at, self.begin = reals(earlier[-1]), reals(earlier[-1])

        def made(src: int, before: int) -> int:
            return earlier[src] + before - 1 if before > 1 else src

        handed: list[Step] = []
        for src, first in enumerate(earlier[:-1]):
            slots = [src, *range(first, first + most[src])]
            handed += [(older, older, 0.0, 0.0, (newer,)) for newer, older in reversed([*pairwise(slots)])]
        groups: list[tuple[int, int, list[Step]]] = [(1 - max(warmup), count, handed)]
        ahead: list[tuple[int, int, list[Step]]] = []
        for c, row in enumerate(rows):
            needs = [(made(src, warmup[src] - warmup[c]), wire, late) for src, wire, late in channels[c][FORWARD]]
            ahead.append((1 - warmup[c], count - warmup[c] + 1, self._pass(c, c, row.forward_s, needs)))
        groups += sorted(ahead, key=lambda group: -group[0])
        back: list[list[tuple[int, int, list[Step]]]] = []
        for c, row in enumerate(rows):
            needs = [(n + src, wire, late) for src, wire, late in channels[c][BACKWARD]]
            after = [self._busy(c, row.after_s)] if row.after_s else []
            back.append([(0, count, self._pass(c, n + c, row.backward_s, needs)), (row.late, count, after)])
        groups += chain.from_iterable(reversed(back))
        self.rounds = Walk(groups)
        self.begin_in: dict[int, list[int]] = {}
        """The round in which each class begins."""
        for c, ahead_of in enumerate(warmup):
            self.begin_in.setdefault(1 - ahead_of, []).append(c)
        self.ends = [self._busy(c, row.after_s * min(row.late, count)) for c, row in enumerate(rows) if row.late]
        """What follows the last round."""

    def _pass(self, c: int, node: int, seconds: float, needs: Sequence[tuple[int, float, float]]) -> list[Step]:
        """A pass of a class behind its messages: the slot of what each carries, seconds on the wire, latency."""
        messages: list[Step] = []
        for slot, wire_s, late in needs:
            wire = next(self._wires)
            messages.append((wire, wire + len(self.rows) + 1 + len(self.sources), wire_s, late, (slot,)))
        return [*messages, (self.clocks + c, node, seconds, 0.0, tuple([step[1] for step in messages]))]

    def _busy(self, c: int, seconds: float) -> Step:
        return self.clocks + c, self.unread, seconds, 0.0, ()

    def meet(self, classes: Sequence[int], seconds: float) -> None:
        """Let classes add up at the end of a step."""
        self.ends.append((MEETING, (self.unread,) * len(classes), seconds, 0.0, tuple([self.clocks + c for c in classes])))

    def update(self, seconds: Sequence[float]) -> None:
        """Let each class update, behind all that has been said before."""
        self.ends += [self._busy(c, took) for c, took in enumerate(seconds)]

    def step(self, start: Sequence[float] = ()) -> Times:
        """One more step, from where the last one has ended: when each class and each wire was first used, and is free again."""
        n, count, at, warmup = len(self.rows), self.count, self.at, self.warmup
        longest, settled = max(warmup), max(row.late for row in self.rows)
        window = longest - min(warmup) + 2  # of the forwards that later rounds may read
        until, begun, returned, ends = at[2 * n : self.clocks], [0.0] * n, at[n:n], walked(self.ends)
        m, steady, length = 1 - longest, 0, 0.0
        while m < count:
            before = at[: self.clocks] if self.sources and settled < m <= count - longest else None
            self.rounds.go(at, self.begin, m)
            for c in self.begin_in.get(m, ()):
                begun[c] = at[c]
            if m == 0:
                returned = at[n : 2 * n]
            if before is not None:
                grew = at[n] - before[n]
                hair = STEADY * grew
                same = abs(length - grew) < hair and grown(at, before, grew, hair)
                steady, length = steady + 1 if same else 0, grew
                skip = count - longest - m
                if steady > window and skip > 0:
                    for i, when in enumerate(at):
                        at[i] = when + skip * grew
                    m += skip
            m += 1
        ends.go(at, self.begin)
        made = [(begun if i < self.num_ahead else returned)[src] for i, src in enumerate(self.sources)]
        sent = [max(when, free) for when, free in zip(made, until, strict=True)]
        first = [when - row.forward_s for when, row in zip(begun, self.rows, strict=True)]
        return Times([], [], [*first, *sent], [*at[self.clocks : self.unread], *at[2 * n : self.clocks]])

    def pace(self, count: int) -> float:
        """Seconds of a mini-batch of so many micro-batches in a pipeline that does not drain, once it is full.

        Some mini-batches later all times are what they were, but for what passes meanwhile: as many as the slowest round trip takes
        to come back to a class, which has so many micro-batches in flight. Classes that nobody holds back, as those of a frozen
        tower, may be ahead of others for good, so that each has a growth of its own.
        """
        n, at, longest, ends = len(self.rows), self.at, max(self.warmup), walked(self.ends)
        for m in range(1 - longest, 0):
            self.rounds.go(at, self.begin, m)
        states: list[array[float]] = []
        for first in range(0, max(STREAM * longest, 4 * count), count):
            for m in range(first, first + count):
                self.rounds.go(at, self.begin, m)
            ends.go(at, self.begin)
            now = at[: self.unread] + at[self.unread + 1 + len(self.sources) :]
            for back, before in enumerate(reversed(states[-longest:]), 1):
                grew = now[n] - before[n]
                if grown(now, before, grew, STEADY * grew):
                    return grew / back
            states.append(now)
        clocks = [state[self.clocks : self.unread] for state in states]
        if (found := repeating(clocks, longest)) is not None:
            return found
        half = len(clocks) // 2
        return max(x - y for x, y in zip(clocks[-1], clocks[half - 1], strict=True)) / (len(clocks) - half)
