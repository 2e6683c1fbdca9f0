"""The steady state of a pipeline whose stages have helpers: every device does the same once a period, side by side.

The delays of such a plan (`gpp.mechanisms.helpers.stage`) put the passes that follow each other into different periods, so that no
device waits for another's work of the same period, and messages travel meanwhile. So there is no path of waits whose length would
say what a mini-batch takes (`gpp.simulate.longest_path`): it takes as long as the longest load of a device or of a link:

* a device has the forwards of its stages, the parts of I and W that it makes of theirs and of others', the sums of gradients with
  helpers, and its updates;
* a link has what stages send each other, what helpers are sent for I (the gradients of the stage's outputs) and for W (these and
  what was saved for them); helpers for I are sent their part of the weights with every micro-batch.

That messages are never late is the model's own assumption: a message may take as long as a period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.mechanisms.helpers.bill import gradient_bytes, late_bytes
from gpp.mechanisms.helpers.stage import helpers_of, parts_of_inputs
from gpp.mechanisms.split_backward.kinds import INPUT_GRADIENTS, WEIGHT_GRADIENTS
from gpp.plan.plan import Plan
from gpp.program.kinds import BACKWARD, COMPUTE, FORWARD, PASS, REDUCE, UPDATE, pass_seconds
from gpp.simulate.added import AbstractPrediction
from gpp.timeline import Event, Metrics, Timeline

Link = tuple[int, int]
"""Source and destination device."""


class DeviceWork(NamedTuple):
    """A device's work for a stage: `times` times a mini-batch, `seconds` each."""

    device: int
    kind: str
    stage: int
    times: int
    seconds: float


class Prediction(AbstractPrediction):
    """One mini-batch of the steady state."""

    def predict(self, plan: Plan, problem: Problem, *, record: bool) -> Timeline:
        work = [each for s, bill in enumerate(plan.bills(problem)) for each in _work(plan, problem, s, bill)]
        busy: defaultdict[int, float] = defaultdict(float)
        for each in work:
            busy[each.device] += each.times * each.seconds
        carried = _carried(plan, problem)
        on_links = [size / problem.cluster.link(*ends).bandwidth_bytes_per_s for ends, size in carried.items()]
        period = max([*busy.values(), *on_links])
        computing = sum(each.times * each.seconds for each in work if each.kind in COMPUTE)
        held = {s: stage.in_flight for s, stage in enumerate(plan.stages)}
        weights, places = problem.regime.weights, [plan.position(s) for s in range(len(plan.stages))]
        metrics = Metrics(
            iteration_s=period,
            throughput_samples_per_s=plan.minibatch_size / period if period else 0.0,
            bubble_fraction=max(0.0, 1.0 - computing / (plan.num_devices * period)) if period else 0.0,
            peak_memory_bytes={device: round(size) for device, size in plan.device_memory(problem, held).items()},
            communication_bytes=round(sum(carried.values())),
            max_in_flight_samples=held,
            weight_versions={s: weights.copies(place) for s, place in enumerate(places)},
            staleness={s: weights.staleness(place) for s, place in enumerate(places)},
        )
        return Timeline(source="predicted", metrics=metrics, events=tuple(_events(work)) if record else ())


def _work(plan: Plan, problem: Problem, s: int, bill: StageCost) -> Iterator[DeviceWork]:
    """Everything that is done of a stage for a mini-batch."""
    stage, took = plan.stages[s], pass_seconds(bill)
    own, times = stage.devices[0], plan.position(s).accumulation
    yield DeviceWork(own, PASS[FORWARD], s, times, took[PASS[FORWARD]])
    if plan.runs_backward(s, problem.graph):
        if stage.beside:
            for device, share in parts_of_inputs(stage):
                if share > 0.0:
                    yield DeviceWork(device, INPUT_GRADIENTS, s, times, share * took[INPUT_GRADIENTS])
            (helper,) = stage.adding or (own,)
            yield DeviceWork(helper, WEIGHT_GRADIENTS, s, times, took[WEIGHT_GRADIENTS])
            if helper != own:
                members = (own, helper)
                seconds = problem.cluster.allreduce_s(problem.trainable_bytes(stage.ops), members)
                yield from (DeviceWork(device, REDUCE, s, 1, seconds) for device in members)
        else:
            yield DeviceWork(own, PASS[BACKWARD], s, times, took[PASS[BACKWARD]])
    yield DeviceWork(own, UPDATE, s, 1, bill.update_s)


def _carried(plan: Plan, problem: Problem) -> dict[Link, float]:
    """Bytes that every link carries for a mini-batch; what a device hands to itself is left out."""
    out: defaultdict[Link, float] = defaultdict(float)
    samples, returning = plan.minibatch_size, plan.returning(problem.graph)
    for (s, t), tensors in plan.edge_tensors(problem.graph).items():
        here, there = plan.stages[s].devices[0], plan.stages[t].devices[0]
        out[here, there] += samples * sum(tensor.bytes_per_sample for tensor in tensors)
        if (s, t) in returning:
            size = sum(tensor.bytes_per_sample for tensor in tensors if tensor.differentiable)
            for device, share in parts_of_inputs(plan.stages[t]):
                out[device, here] += samples * share * size
    for stage in plan.stages:
        own, trained = stage.devices[0], problem.trainable_bytes(stage.ops)
        for helper in stage.adding:
            out[own, helper] += samples * late_bytes(stage, problem.graph) + trained
            out[helper, own] += trained
        for device, share in helpers_of(stage).input_share:
            passes = -(-samples // stage.microbatch_size)
            out[own, device] += samples * gradient_bytes(stage, problem.graph)[1] + passes * share * trained
    return {link: size for link, size in out.items() if link[0] != link[1] and size}


def _events(work: Sequence[DeviceWork]) -> Iterator[Event]:
    """The events of every device in a period, micro-batch by micro-batch. Its sums and updates come last."""
    free: defaultdict[int, float] = defaultdict(float)
    rounds = max(each.times for each in work)
    ordered = [(m, each) for m in range(rounds) for each in work if each.kind in COMPUTE and m < each.times]
    ordered += [(0, each) for each in work if each.kind not in COMPUTE]
    for microbatch, (device, kind, stage, _, seconds) in ordered:
        if seconds > 0.0:
            start, free[device] = free[device], free[device] + seconds
            yield Event(device, kind, stage, microbatch, start, free[device])


PREDICTION = Prediction()
