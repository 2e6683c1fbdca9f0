"""Discrete-event run of a stream of requests on a cost model: throughput, latency, and events of the steady state.

The rules are those of `stream.py`. The order of the passes is static, so all times follow from those before: a request is
one walk over its passes. At saturation requests follow each other until each repeats the one before, which is the period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from gpp.compiled import reals
from gpp.cost.problem import Problem
from gpp.mechanisms.serving.course import Arrivals, requests_of
from gpp.mechanisms.serving.stream import check_served
from gpp.plan.plan import Plan
from gpp.program.held import device_peaks
from gpp.program.kinds import FORWARD, PASS, SEND, Action
from gpp.program.program import Program
from gpp.program.waits import OCCUPY, Waits
from gpp.simulate.added import AbstractPlanning, Objective
from gpp.simulate.longest_path import Step, walked
from gpp.simulate.simulator import SHOWN, Costs
from gpp.timeline import ENDLESS, Event, Metrics, Serving, StageMemory, Timeline

LONGEST = 512
"""Requests after which the pace is the mean of the second half, if they have not come to repeat each other."""

SAME = 1e-9
"""Share of a period by which rounding may move an event."""


class _Send(NamedTuple):
    """A message that a pass sends in every request: its node, the label of its costs, and its channel's resource."""

    node: int
    label: int
    channel: int


class _Pass(NamedTuple):
    """A pass of every request: its node, the resource of its device, the messages that it waits for and those that it sends."""

    action: Action
    device: int
    node: int
    resource: int
    seconds: float
    needs: tuple[int, ...]
    sends: list[_Send]


@final
class Stream:
    """A simulated stream of requests, one after the other: each is a walk (`gpp.simulate.longest_path`) that goes on from the last.

    Args:
        slower: factor on the seconds of every pass.

    `begins` are when the passes of the last request began, in the order of `passes`; `count` are the micro-batches of one.
    """

    def __init__(self, program: Program, plan: Plan, problem: Problem, *, slower: float = 1.0) -> None:
        self.buffers, self.costs = requests_of(problem.regime.course).buffers, Costs.of(program, plan, problem)
        self.passes = _passes(program, plan, self.costs, slower)
        self.count = 1 + max(one.action.microbatch for one in self.passes)
        self.events: list[Event] | None = None
        self._older: dict[int, int] = {}
        self.steps: list[Step] = []
        self._add_steps(program.waits, plan, [bill.update_s * slower for bill in plan.bills(problem)])
        # What earlier requests have left behind is handed on first, the oldest before what takes its place.
        self.steps[:0] = [(older, older, 0.0, 0.0, (newer,)) for newer, older in reversed(self._older.items())]
        self.walk, self.at, self.begin = walked(self.steps), reals(self.num_slots), reals(self.num_slots)
        self.begins: list[float] = []

    def _add_steps(self, waits: Waits, plan: Plan, update_s: Sequence[float]) -> None:
        """The steps of a request. Behind the slots of nodes and resources come two for each pass, when it began and when what it
        made had left; then the request's arrival, one that nobody reads, and what earlier requests have left.

        Args:
            update_s: for which a device is busy behind its last pass: its share of what a request costs the runtime.
        """
        n, late = waits.num_nodes, self.costs.late
        first = n + waits.num_resources
        self.begun = [first + 2 * i for i in range(len(self.passes))]
        self.arrival, unread = first + 2 * len(self.passes), first + 2 * len(self.passes) + 1
        self.num_slots = unread + 1
        began: dict[int, list[int]] = defaultdict(list)  # by resource, in the order of its passes
        left: dict[int, list[int]] = defaultdict(list)
        place: dict[int, int] = {}
        for one, slot in zip(self.passes, self.begun, strict=True):
            place[one.node] = len(began[one.resource])
            began[one.resource].append(slot)
            left[one.resource].append(slot + 1)
        for one, slot in zip(self.passes, self.begun, strict=True):
            device, own, stage = n + one.resource, place[one.node], one.action.stage
            arrival = () if plan.predecessors[stage] else (self.arrival,)
            room = self._before(left[one.resource], own - self.buffers - 1)
            self.steps.append((device, slot, 0.0, 0.0, (*one.needs, room, *arrival)))
            self.steps.append((device, one.node, one.seconds, 0.0, ()))
            for node, label, channel in one.sends:
                reader = waits.reader[node]
                taken = self._before(began[waits.resource(reader)], place[reader] - self.buffers)
                latency_s = late[channel - len(waits.devices)]
                self.steps.append((n + channel, node, self.costs.seconds[label], latency_s, (one.node, taken)))
            self.steps.append((slot + 1, slot + 1, 0.0, 0.0, (one.node, *(n + send.channel for send in one.sends))))
            if own + 1 == len(began[one.resource]):
                self.steps.append((device, unread, update_s[stage], 0.0, ()))

    def _before(self, own: Sequence[int], place: int) -> int:
        """The slot of a pass of a device by its place in this request; a place below 0 is one of a request before."""
        requests, place = divmod(place, len(own))
        slot = own[place]
        for _ in range(-requests):
            if slot not in self._older:
                self._older[slot] = self.num_slots
                self.num_slots += 1
            slot = self._older[slot]
        return slot

    def request(self, arrival_s: float, number: int = 0) -> tuple[float, float]:
        """Run one more request; returns when its first pass began and when its last one ended.

        Args:
            arrival_s: when it comes.
            number: the request's number, for events.
        """
        at = self.at
        at[self.arrival] = arrival_s
        self.walk.go(at, self.begin)
        self.begins = [at[slot] for slot in self.begun]
        if self.events is not None:
            self.events += [
                event for one in self.passes for event in self._events_of(one, one.action.microbatch + number * self.count)
            ]
        return min(self.begins), max([at[one.node] for one in self.passes])

    def _events_of(self, one: _Pass, microbatch: int) -> Iterator[Event]:
        """The messages of a pass of the last request, then the pass."""
        sent = [(SEND[FORWARD], send.node, self.costs.num_bytes[send.label]) for send in one.sends]
        for kind, node, size in [*sent, (PASS[FORWARD], one.node, 0.0)]:
            yield Event(one.device, kind, one.action.stage, microbatch, self.begin[node], self.at[node], round(size))


def _passes(program: Program, plan: Plan, costs: Costs, slower: float) -> list[_Pass]:
    """The passes of a request in an order in which they can run: by micro-batch, and by the stage graph."""
    out, latest, waits, depth = list[_Pass](), dict[int, _Pass](), program.waits, plan.distance_to_sink
    for does, node, resource, label, needs, occupied in waits.order:
        if does == OCCUPY:
            device = waits.devices[resource]
            one = _Pass(waits.action(node), device, node, resource, costs.seconds[label] * slower, needs, [])
            latest[resource] = one
            out.append(one)
        else:
            latest[resource].sends.append(_Send(node, label, occupied))
    return sorted(out, key=lambda one: (one.action.microbatch, -depth[one.action.stage], one.device))


def period_s(stream: Stream) -> float:
    """Seconds of a request at saturation: requests go through until each is like the one before, only later."""
    enough, alike, ends = 1 + -(-(stream.buffers + 1) // stream.count), 0, list[float]()
    before: Sequence[float] = ()
    for _ in range(LONGEST):
        ends.append(stream.request(0.0)[1])
        moved = [now - then for now, then in zip(stream.begins, before, strict=False)]
        alike = alike + 1 if moved and max(moved) - min(moved) <= SAME * max(moved) else 0
        if alike >= enough:
            return max(moved)
        before = stream.begins
    half = LONGEST // 2
    return (ends[-1] - ends[half - 1]) / (LONGEST - half)


def _slower(program: Program, plan: Plan, problem: Problem) -> float:
    """The factor by which passes take longer, where devices share processors in equal parts."""
    cores = problem.cluster.processors
    if cores is None or not problem.cluster.crowded(plan.num_devices):
        return 1.0
    stream = Stream(program, plan, problem)
    busy = sum(one.seconds for one in stream.passes) / period_s(stream)
    return max(1.0, busy / cores)


def serving_of(came: Sequence[float], ended: Sequence[float], arrivals: Arrivals, buffers: int) -> Serving:
    """Throughput and latencies of requests, measured or predicted.

    Args:
        came: when each arrived; at saturation, when its first pass began.
        ended: when the last of its answers was there.
    """
    latencies = sorted(end - begin for begin, end in zip(came, ended, strict=True))
    # Filling the pipeline is none of the pace.
    first = min(len(ended) // 4, 16)
    counted = len(ended) - 1 - first
    pace = (ended[-1] - ended[first]) / counted if counted > 0 else ended[-1] - came[0]
    return Serving(
        buffers=buffers,
        requests=len(ended),
        arrival_rate=arrivals.rate,
        requests_per_s=1.0 / pace if pace > 0 else 0.0,
        mean_s=sum(latencies) / len(latencies),
        median_s=float(np.quantile(latencies, 0.5)),
        p95_s=float(np.quantile(latencies, 0.95)),
        p99_s=float(np.quantile(latencies, 0.99)),
    )


def scored(program: Program, plan: Plan, problem: Problem, objective: Objective) -> Timeline:
    """The metrics of a candidate alone; `iteration_s` is what the planner minimises, throughput is what follows from it.

    Of `throughput` that is the seconds of a request at saturation, of `latency` the mean of the requests at the arrival rate, or of
    one alone where there is no rate.
    """
    arrivals = requests_of(problem.regime.course).arrivals
    if objective == "latency":
        seconds = _answered(program, plan, problem, arrivals if arrivals.rate else replace(arrivals, requests=1)).mean_s
    else:
        seconds = period_s(Stream(program, plan, problem, slower=_slower(program, plan, problem)))
    memory = {device: round(need) for device, need in device_peaks(program, plan.bills(problem)).items()}
    metrics = replace(
        ENDLESS,
        iteration_s=seconds,
        throughput_samples_per_s=plan.minibatch_size / seconds if seconds else 0.0,
        bubble_fraction=0.0,
        peak_memory_bytes=memory,
    )
    return Timeline(source="predicted", metrics=metrics)


def _answered(program: Program, plan: Plan, problem: Problem, arrivals: Arrivals) -> Serving:
    stream = Stream(program, plan, problem, slower=_slower(program, plan, problem))
    came, ended = list[float](), list[float]()
    for at in arrivals.times_s():
        begun, end = stream.request(at)
        came.append(at if arrivals.rate else begun)
        ended.append(end)
    return serving_of(came, ended, arrivals, stream.buffers)


def _shown(stream: Stream, times_s: Sequence[float], iteration_s: float) -> list[Event]:
    """Events of `SHOWN` periods, of a stream at its pace or of one that has not begun."""
    # Of requests that are already on their way nothing was noted: where the last stage goes on with the next one, all have been.
    begin, stream.events = (max(stream.begins) + iteration_s if stream.begins else 0.0), []
    low, high, number = begin - SAME * iteration_s, begin + (SHOWN - SAME) * iteration_s, 0
    while number == 0 or min(stream.begins) < high:
        stream.request(times_s[min(number, len(times_s) - 1)], number)
        number += 1
    return [e._replace(start_s=e.start_s - begin, end_s=e.end_s - begin) for e in stream.events if low <= e.start_s < high]


def serve(program: Program, plan: Plan, problem: Problem) -> Timeline:
    """The timeline of a stream of requests; `iteration_s` is the seconds of a request at saturation, or at the arrival rate.

    Args:
        program: the program of one request.
    """
    arrivals, slower = requests_of(problem.regime.course).arrivals, _slower(program, plan, problem)
    stream = Stream(program, plan, problem, slower=slower)
    iteration_s = period_s(stream)
    serving = _answered(program, plan, problem, arrivals)
    if arrivals.rate:
        # From an idle pipeline on, as the stream begins.
        iteration_s, stream = 1.0 / serving.requests_per_s, Stream(program, plan, problem, slower=slower)
    events = _shown(stream, arrivals.times_s(), iteration_s)
    beside = plan.beside_s(problem)
    busy = sum(one.seconds - beside[one.action.stage][0] for one in stream.passes)
    bills = plan.bills(problem)
    metrics = Metrics(
        iteration_s=iteration_s,
        throughput_samples_per_s=plan.minibatch_size / iteration_s if iteration_s else 0.0,
        bubble_fraction=max(0.0, 1.0 - busy / (plan.num_devices * iteration_s)) if iteration_s else 0.0,
        peak_memory_bytes={device: round(need) for device, need in device_peaks(program, bills).items()},
        communication_bytes=round(sum(stream.costs.num_bytes[send.label] for one in stream.passes for send in one.sends)),
        max_in_flight_samples={s: stage.unit for s, stage in enumerate(plan.stages)},
        weight_versions=dict.fromkeys(range(len(plan.stages)), 1),
        serving=serving,
    )
    memory = tuple(
        StageMemory(static_bytes=b.static_bytes, microbatch_bytes=0.0, moved_bytes=0.0, transient_bytes=b.transient_bytes)
        for b in bills
    )
    return Timeline(source="predicted", metrics=metrics, events=tuple(events), steps=SHOWN, memory=memory)


class StreamPlanning(AbstractPlanning):
    """Plans that answer requests."""

    def check(self, plan: Plan) -> None:
        check_served(plan)

    def predict(self, program: Program, plan: Plan, problem: Problem, objective: Objective | None) -> Timeline:
        return serve(program, plan, problem) if objective is None else scored(program, plan, problem, objective)

    def questions(self, problem: Problem, objective: Objective, ahead: int) -> list[Problem]:
        """For throughput, `ahead` requests for each device are one mini-batch: filling hardly counts."""
        if objective == "latency":
            return [problem]
        count = ahead * problem.cluster.num_devices
        regime = replace(problem.regime, minibatches=count)
        return [replace(problem, minibatch_size=problem.minibatch_size * count, regime=regime)]


PLANNING = StreamPlanning()
