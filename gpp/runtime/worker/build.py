"""What a worker makes of its job before the first step: the modules of its stages, with their weights, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from gpp.capture.stage import StageModule, build_stage, tie
from gpp.optimizers import AbstractOptimizer
from gpp.runtime.checkpoint.state import job_weights
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.mailbox import Handover, Mailbox
from gpp.runtime.worker.messages import boundary


def build_modules(job: Job, run_dir: Path, stages: Iterable[int], device: torch.device) -> dict[int, StageModule]:
    """The modules of `stages` with their weights; no other stage's tensors are read."""
    modules: dict[int, StageModule] = {}
    with job_weights(run_dir) as weights:
        for s in stages:
            nodes = [node for op in job.plan.stages[s].ops for node in job.graph.ops[op].nodes]
            module = modules[s] = build_stage(job.captured, nodes, device=device)
            module.load(weights)
    tie(modules.values())
    if job.settings.compile:
        for module in modules.values():
            module.compile_with(job.settings.compile)
    return modules


def build_optimizers(spec: AbstractOptimizer, modules: Mapping[int, StageModule]) -> dict[int, torch.optim.Optimizer]:
    """An optimizer for each stage that trains; a weight shared by two stages of this device is the first's."""
    out, taken = {}, set()
    for s, module in modules.items():
        own = [p for p in module.parameters() if p.requires_grad and p not in taken]
        taken.update(own)
        if own:
            out[s] = spec.build(own)
    return out


def build_mailboxes(
    job: Job,
    modules: Mapping[int, StageModule],
    *,
    device_id: int,
    device: torch.device,
    transport: AbstractTransport,
    narrow: torch.dtype | None,
) -> dict[int, Mailbox]:
    """A mailbox for each stage of a device.

    Args:
        narrow: see `gpp.runtime.worker.messages.boundary`.
    """
    handover: Handover = {}
    return {
        s: Mailbox(
            stage=s,
            device_id=device_id,
            transport=transport,
            device=device,
            boundary=boundary(job.plan, job.graph, module, s, narrow),
            handover=handover,
        )
        for s, module in modules.items()
    }
