"""The results of a stream of requests: its pace, latencies, memory, and the quality of its answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpp.graph.captured import Captured, loss_nodes, with_total
from gpp.mechanisms.serving.course import requests_of
from gpp.mechanisms.serving.model import ANSWER, network_of
from gpp.mechanisms.serving.planning import serving_of
from gpp.program.kinds import COMPUTE, SENDS
from gpp.runtime.controller.collected import devices_of
from gpp.runtime.job import Job
from gpp.simulate.simulator import SHOWN
from gpp.timeline import Emulation, Event, Metrics, Outcome, Timeline


def collect(job: Job, run_dir: Path, starts: dict[int, float], ends: dict[int, float]) -> Outcome:
    """The measured timeline of a stream: its last requests."""
    devices = devices_of(run_dir / "ranks")
    return Outcome(measured=timeline(job, devices, starts, ends))


def collect_emulated(job: Job, run_dir: Path, starts: dict[int, float], ends: dict[int, float]) -> Outcome:
    """The same of emulated devices: paced, in seconds of the cluster, and by the virtual clock."""
    devices = devices_of(run_dir / "ranks")
    scale = devices[0]["time_scale"]
    measured = timeline(job, devices, starts, ends, seconds=1.0 / scale)
    virtual = list(zip(*(device["virtual"] for device in devices), strict=True))
    came, answered = [min(begin for begin, _ in of) for of in virtual], [max(end for _, end in of) for of in virtual]
    settings = requests_of(job.settings.course)
    serving = serving_of(came, answered, settings.arrivals, settings.buffers)
    numbers = sorted(ends)
    emulation = Emulation(
        time_scale=scale,
        virtual_iteration_s=1.0 / serving.requests_per_s,
        unpaced_s=max(device["unpaced_s"] for device in devices),
        step_s=tuple((ends[n] - ends[n - 1]) / scale for n in numbers[1:]),
        serving=serving,
    )
    return Outcome(measured=measured, emulation=emulation)


def timeline(
    job: Job, devices: list[dict[str, Any]], starts: dict[int, float], ends: dict[int, float], *, seconds: float = 1.0
) -> Timeline:
    """The measured timeline of a stream.

    Args:
        devices: their records.
        starts, ends: of each request.
        seconds: what one second of the workers' clocks stands for.
    """
    serving_settings = requests_of(job.settings.course)
    numbers = sorted(ends)
    serving = serving_of(
        [starts[n] * seconds for n in numbers],
        [ends[n] * seconds for n in numbers],
        serving_settings.arrivals,
        serving_settings.buffers,
    )
    # As of steps of a training, what other programs take of the machine now and then is none of the pace.
    took = [(ends[n] - ends[n - 1]) * seconds for n in numbers[min(len(numbers) // 4, 16) + 1 :]]
    period_s = statistics.median(took) if took else 1.0 / serving.requests_per_s
    if serving_settings.arrivals.rate:
        period_s = 1.0 / serving.requests_per_s
    seen = [Event(*event) for device in devices for record in device["steps"] for event in record["events"]]
    counted = max(len(devices[0]["steps"]), 1)
    # Of a typical request on each device, as the period is that of a typical one: else a few slow ones would hide all waiting.
    busy_s = sum(statistics.median(map(_busy_s, device["steps"])) for device in devices if device["steps"]) * seconds
    sent = sum(e.num_bytes for e in seen if e.kind in SENDS) / counted
    # Of the requests whose events were kept, some in the middle, where no device is before its first or behind its last.
    first = numbers[-min(len(numbers), max(SHOWN + 1, counted // 2 + 1))]
    begin, length = starts[first], SHOWN * period_s / seconds
    events = sorted(
        (
            e._replace(start_s=(e.start_s - begin) * seconds, end_s=(e.end_s - begin) * seconds)
            for e in seen
            if begin <= e.start_s < begin + length
        ),
        key=lambda e: (e.start_s, e.device),
    )
    plan = job.plan
    metrics = Metrics(
        iteration_s=period_s,
        throughput_samples_per_s=plan.minibatch_size / period_s,
        bubble_fraction=max(0.0, 1.0 - busy_s / (len(devices) * period_s)),
        peak_memory_bytes={device["device"]: device["peak_memory_bytes"] for device in devices},
        communication_bytes=round(sent),
        max_in_flight_samples={s: stage.unit for s, stage in enumerate(plan.stages)},
        weight_versions=dict.fromkeys(range(len(plan.stages)), 1),
        serving=serving,
    )
    return Timeline(source="measured", metrics=metrics, events=tuple(events), steps=SHOWN)


def _busy_s(record: Mapping[str, Any]) -> float:
    """Seconds that a device computes for a request."""
    return sum(event.end_s - event.start_s for event in (Event(*each) for each in record["events"]) if event.kind in COMPUTE)


def judged(captured: Captured, job: Job, run_dir: Path, data: Any, model: Any) -> dict[str, float]:
    """Loss and metrics of the answers, each sample of the data set that is answered once, by the names of the captured results.

    The workers compute none of it: this is a stage of its own, made of what the network is not, which reads the answers from their
    file.

    Args:
        captured: the model with its loss.
    """
    import torch
    from safetensors import safe_open

    from gpp.capture.stage import build_stage
    from gpp.mechanisms.serving.answers import MARK
    from gpp.runtime.run_dir import ANSWERS

    network = network_of(captured)
    nodes = [node.name for node in captured.nodes if node.kind in ("call", "block") and not node.free and node.name not in network]
    if not nodes or not loss_nodes(captured.results):
        return {}
    stage = build_stage(captured, nodes, device="cpu").eval_module()
    settings, serving = job.settings, requests_of(job.settings.course)
    samples = data.load(serving.split, model, seed=settings.seed, dtype=settings.dtype)
    size, count = job.plan.minibatch_size, min(len(samples), settings.steps * job.plan.minibatch_size)
    totals: dict[str, float] = {}
    with safe_open(run_dir / ANSWERS, framework="pt") as file, torch.inference_mode():
        names = [name.removeprefix(ANSWER) for name in job.captured.results]
        kinds = {name: file.get_slice(name) for name in names}
        answered = torch.stack([file.get_slice(f"{MARK}{name}")[:count] for name in names]).all(0).nonzero().flatten()

        def rows(lo: int, hi: int) -> dict[str, torch.Tensor]:
            return samples.fetch(answered[lo:hi], set(stage.inputs))

        counted = stage.counting(rows, rows, len(answered))
        for lo in range(0, len(answered), size):
            hi = min(lo + size, len(answered))
            first, last = int(answered[lo]), int(answered[hi - 1]) + 1
            values = {name: kind[first:last][answered[lo:hi] - first] for name, kind in kinds.items()} | counted(lo, hi)
            for name, value in stage.forward(hi - lo, values).items():
                totals[name] = totals.get(name, 0.0) + float(value) * (hi - lo) / len(answered)
    return with_total(totals)
