"""The real workers on cards of the stream model: `tests.support.cards` has the rules that they are held to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from gpp.graph.captured import is_loss
from gpp.program.communicators import communicators
from gpp.program.program import reduce_groups, teams
from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.checkpoint.final import finish_final, load_final
from gpp.runtime.job import Job
from gpp.runtime.transport.cards import CardTransport
from gpp.runtime.transport.channels import AbstractTransport
from gpp.runtime.worker.clock import CardClock
from gpp.runtime.worker.main import course
from gpp.runtime.worker.seat import Seat
from gpp.runtime.worker.worker import Worker
from tests.support.cards.card import ModelCard, run
from tests.support.cards.machine import Machine

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
    made = communicators(reduce_groups(job.plan, job.graph), *programs, replicas=teams(job.plan))
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
    proved: bool = True,
) -> Trained:
    """Run a job whose devices are cards, evaluations and checkpoints included.

    Args:
        transport: of a device.
        change: is given every worker before its first step.
        proved: whether the job is read from its files, which proves that it cannot hang.
    """
    assert job.settings.device_kind == "cuda"
    machine = machine or Machine()
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir(exist_ok=True)
    job = Job.load(run_dir) if proved else job

    def worker_of(device: int) -> Callable[[ModelCard], str]:
        def program(card: ModelCard) -> str:
            worker = Worker(
                job,
                run_dir,
                Seat(
                    device_id=device, device=card.device, transport=transport(job, card, device), clock=CardClock(card), card=card
                ),
            )
            change(worker)
            _wait_in_turn(worker, card)
            lines = StringIO()
            course(worker, lines)
            return lines.getvalue()

        return program

    logs = run(machine, [worker_of(device) for device in sorted(job.plan.stages_of_device)])
    losses = [0.0] * (job.settings.steps - job.settings.first_step)
    evaluations: dict[int, dict[str, float]] = {}
    for record in (json.loads(line) for log in logs for line in log.splitlines()):
        if "evaluated" in record:
            found = evaluations.setdefault(record.pop("evaluated"), {})
            for name, value in record.items():
                found[name] = found.get(name, 0.0) + value
        else:
            losses[record["step"] - job.settings.first_step] += sum(value for name, value in record.items() if is_loss(name))
    finish_final(job, run_dir)
    return Trained(losses=losses, evaluations=evaluations, weights=load_final(run_dir), machine=machine)


def _wait_in_turn(worker: Worker, card: ModelCard) -> None:
    """Hosts of the model take turns: one that waits for a thread which waits for the others lets them go first."""
    wait, checkpoints = worker.checkpoints.wait, worker.checkpoints

    def polite() -> None:
        while checkpoints._thread is not None and checkpoints._thread.is_alive():
            card.host.pause()
        wait()

    checkpoints.wait = polite


def wait_for_the_device(worker: Worker) -> None:
    """A change of a worker: a device-wide wait after every pass."""
    card = worker.card
    assert isinstance(card, ModelCard)
    for runner in worker.training.runners.values():
        runner.forward = _then(runner.forward, card.device_wait)
        runner.backward = _then(runner.backward, card.device_wait)


def _then(call: Callable[[int], Any], after: Callable[[], None]) -> Callable[[int], Any]:
    def both(microbatch: int) -> Any:
        out = call(microbatch)
        after()
        return out

    return both
