"""The real workers on cards of the stream model: `gpp.runtime.cards.model` has the rules that they are held to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch

from gpp.graph.captured import is_loss
from gpp.program.communicators import communicators
from gpp.program.program import reduce_groups
from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.cards.model.card import ModelCard, run
from gpp.runtime.cards.model.machine import Machine
from gpp.runtime.checkpoint.state import load_final
from gpp.runtime.job import Job
from gpp.runtime.transport.cards import CardTransport
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.worker import Worker

MakeTransport = Callable[[Job, AbstractCard, int], AbstractTransport]
Change = Callable[[Worker], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What workers on cards have made: the loss of each step, evaluations by step, final weights, and the machine."""

    losses: list[float]
    evaluations: dict[int, dict[str, float]]
    weights: dict[str, torch.Tensor]
    machine: Machine


def card_transport(job: Job, card: AbstractCard, device: int) -> AbstractTransport:
    """As a worker process makes it."""
    programs = [job.program, *([job.evaluation] if job.evaluation else [])]
    made = communicators(reduce_groups(job.plan, job.graph), *programs)
    ranks = {d: r for r, d in enumerate(sorted(job.plan.stages_of_device))}
    return CardTransport(card, made, device=device, rank_of=ranks)


def train(
    job: Job,
    run_dir: Path,
    weights: dict[str, torch.Tensor],
    machine: Machine | None = None,
    *,
    transport: MakeTransport = card_transport,
    change: Change = lambda worker: None,
) -> Trained:
    """Run a job whose devices are cards, evaluations and checkpoints included.

    Args:
        transport: of a device.
        change: is given every worker before its first step.
    """
    assert job.settings.backend == "nccl"
    machine = machine or Machine()
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir(exist_ok=True)
    job = Job.load(run_dir)

    def worker_of(device: int) -> Callable[[ModelCard], str]:
        def program(card: ModelCard) -> str:
            worker = Worker(job, run_dir, device_id=device, device=card.device, transport=transport(job, card, device), card=card)
            change(worker)
            lines = StringIO()
            worker.run(lines)
            return lines.getvalue()

        return program

    logs = run(machine, [worker_of(device) for device in sorted(job.plan.stages_of_device)])
    losses = [0.0] * (job.settings.steps - job.settings.first_step)
    evaluations: dict[int, dict[str, float]] = {}
    for record in (json.loads(line) for log in logs for line in log.splitlines()):
        if "evaluated" in record:
            found = evaluations.setdefault(record["evaluated"], {})
            for name, value in record.items():
                found[name] = found.get(name, 0.0) + value
        else:
            losses[record["step"] - job.settings.first_step] += sum(value for name, value in record.items() if is_loss(name))
    return Trained(losses=losses, evaluations=evaluations, weights=load_final(run_dir), machine=machine)
