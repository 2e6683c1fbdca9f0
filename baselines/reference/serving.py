"""Process of `engine=reference` in mode=inference: stage after stage, micro-batch after micro-batch, and no pipeline.

It shares the stages' code, the codec of quantised messages and the file of the answers with the workers, and nothing that handles
messages, buffers or order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from gpp.capture.stage import StageModule, build_stage
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.mechanisms.quantised_edges.worker import CodedLayout
from gpp.mechanisms.serving.answers import answers_of
from gpp.mechanisms.serving.course import requests_of
from gpp.mechanisms.serving.model import ANSWER
from gpp.runtime.checkpoint.state import job_weights
from gpp.runtime.job import Job, restore
from gpp.runtime.worker.messages import boundary
from gpp.runtime.worker.process import guarded, open_lines, write_line


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    settings, plan, serving = job.settings, job.plan, requests_of(job.settings.course)
    order = sorted(range(len(plan.stages)), key=lambda s: -plan.distance_to_sink[s])
    modules = {}
    with job_weights(run_dir) as weights:
        for s in order:
            module = build_stage(
                job.captured, [node for op in plan.stages[s].ops for node in job.graph.ops[op].nodes], device=device
            )
            module.load(weights)
            modules[s] = module.eval_module()
    incoming = {s: list(_coded(job, module, s)) for s, module in modules.items()}
    model = restore(settings.model) if settings.model else None
    samples = restore(settings.data).load(serving.split, model, seed=settings.seed, dtype=settings.dtype)
    wanted = {name for module in modules.values() for name in module.inputs}
    answers = answers_of(job, run_dir) if serving.answers else None
    size, request = plan.stages[0].microbatch_size, plan.minibatch_size
    with open_lines(run_dir, rank) as out, torch.inference_mode():
        for number in range(settings.steps):
            start = time.perf_counter()
            for lo in range(number * request, (number + 1) * request, size):
                values = samples.fetch(torch.arange(lo, lo + size) % len(samples), wanted)
                for s in order:
                    values |= modules[s].forward(size, values | _received(incoming[s], values))
                for name in job.captured.results:
                    if answers is None:
                        break
                    dim = job.captured.node_of[name.removeprefix(ANSWER)].batch_dim or 0
                    answers.write(name.removeprefix(ANSWER), lo, values[name].movedim(dim, 0))
            write_line(out, {"step": number, "start": start, "end": time.perf_counter()})
    if answers:
        answers.close()


def _coded(job: Job, module: StageModule, stage: int) -> Iterator[CodedLayout]:
    """The quantised messages that a stage gets."""
    tensors = job.plan.edge_tensors(job.graph)
    for s, layout in boundary(job.plan, job.graph, module, stage).incoming.items():
        if value := job.plan.stages[s][EdgeBits]:
            yield CodedLayout.of(layout, tensors[s, stage], value.to(stage), clip=value.clip)


def _received(codings: Iterable[CodedLayout], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a stage gets in place of values that are quantised on their way to it."""
    found = {}
    for coding in codings:
        for name, spec, quantiser in zip(coding.layout.names, coding.layout.specs, coding.quantisers, strict=True):
            if quantiser:
                sent = quantiser.encode(values[name].movedim(spec.batch_dim, 0))
                found[name] = quantiser.decode(sent).movedim(0, spec.batch_dim)
    return found


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
