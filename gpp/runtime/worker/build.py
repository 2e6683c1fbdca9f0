"""The parts that a worker makes of its job before the first step: its stages' modules, their weights and teams, optimizers."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, final

import torch

from gpp.capture.cut import AbstractShards
from gpp.capture.stage import StageModule, build_stage, tie
from gpp.mechanism import parts
from gpp.optimizers import AbstractOptimizer
from gpp.program.program import Program
from gpp.runtime.checkpoint.checkpoint import WEIGHTS, Checkpointer
from gpp.runtime.checkpoint.final import save_final
from gpp.runtime.checkpoint.moves import owned_names
from gpp.runtime.checkpoint.origin import fill, origin_of
from gpp.runtime.checkpoint.state import SplitWeights, job_weights
from gpp.runtime.hang_detection.status import AbstractStatus
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import AbstractTransport, Channel
from gpp.runtime.transport.shared_memory import RingSize
from gpp.runtime.worker.hooks import AbstractWorkerPart, Hooks, OwnDevice
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import boundary, ring_sizes, sending
from gpp.runtime.worker.stage import StageRunner

T = TypeVar("T")


@final
class Teams:
    """A worker's teams, one for each of its stages whose replicas are several devices.

    `shards` has the worker's part of each of these stages, and `split` says which of all its weights are shares.
    """

    def __init__(
        self, job: Job, stages: Collection[int], device_id: int, transport: AbstractTransport, status: AbstractStatus
    ) -> None:
        self._saves = job.settings.final_weights
        self._first = tuple(s for s in stages if device_id in job.plan.stages[s].replicas[0])
        """The stages whose first replica, whose weights are those that are saved, the worker is of."""
        self.shards: dict[int, AbstractShards] = {}
        for s in stages:
            stage = job.plan.stages[s]
            names = [value.name for value in stage.mechanisms if value.devices_per_replica > 1]
            for part in parts(names, "worker", "WORKER", AbstractWorkerPart):
                if (shards := part.shards(job, stage, device_id, transport, status)) is not None:
                    self.shards[s] = shards
        self.split = SplitWeights({})

    def _leads(self, stage: int) -> bool:
        """Whether this worker reports for its replica what all members have."""
        return stage not in self.shards or not self.shards[stage].member

    def led(self, of_stage: Mapping[int, T]) -> list[T]:
        """The values of those stages whose replica this worker leads."""
        return [value for s, value in of_stage.items() if self._leads(s)]

    def save(self, run_dir: Path, modules: Mapping[int, StageModule]) -> None:
        """Write the final weights of the worker's stages, whole, if its replica is the one that does, and the job asks for them."""
        for s in self._first if self._saves else ():
            state = {name: self.split.whole(name, tensor) for name, tensor in modules[s].state_dict().items()}
            if self._leads(s):
                save_final(run_dir, s, state)

    def join(self, modules: Mapping[int, StageModule]) -> None:
        """Find out which weights of the stages' modules are shares. The modules must be there."""
        self.split = SplitWeights(
            {
                name: (shards, s in self._first)
                for s, shards in self.shards.items()
                for name, _ in (*modules[s].named_parameters(), *modules[s].named_buffers())
            }
        )


def slower(job: Job, device: int) -> float:
    """The factor by which passes take longer on a device than on the fastest, where workers keep to it (`engine.paced`)."""
    if not job.settings.paced:
        return 1.0
    speeds = [job.cluster.devices[d].speed_factor for d in job.plan.work_of_device]
    return max(speeds) / job.cluster.devices[device].speed_factor


def build_modules(
    job: Job, run_dir: Path, stages: Iterable[int], device: torch.device, teams: Teams, state: Mapping[str, torch.Tensor]
) -> dict[int, StageModule]:
    """The modules of `stages` with their weights; no other stage's tensors are read, and of split ones the device's share only.

    Args:
        state: as of the worker; the job's own weights are read for what it lacks.
    """
    modules: dict[int, StageModule] = {}
    known = {name.removeprefix(WEIGHTS): tensor for name, tensor in state.items() if name.startswith(WEIGHTS)}
    origin = origin_of(run_dir)
    with job_weights(run_dir) as weights:
        for s in stages:
            nodes = job.graph.nodes_of(job.plan.stages[s].ops)
            shards = teams.shards.get(s)
            module = modules[s] = build_stage(job.captured, nodes, device=device, shards=shards)
            if origin is None:
                module.load(weights.of(shards) if shards else ChainMap(known, weights))  # type: ignore[arg-type]
        if origin is not None:
            fill(modules, teams.shards, origin, weights, known)
    tie(modules.values())
    teams.join(modules)
    if job.settings.compile:
        for module in modules.values():
            module.compile_with(job.settings.compile)
    return modules


def build_beside(
    job: Job, folder: Path, modules: Mapping[int, StageModule], device: torch.device, teams: Teams
) -> dict[int, StageModule]:
    """The modules of the same stages, captured at other sizes: with the same parameters and buffers, and constants of their own.

    Args:
        job, folder: of the other sizes; constants whose values the capture lacks are in its file of weights.
        modules, teams: of this worker. Where a stage is split over devices, only the number of samples is another one.
    """
    found: dict[int, StageModule] = {}
    own = {job.captured.node_of[name].target for name in job.captured.constants}
    with job_weights(folder) as constants:
        for s, known in modules.items():
            nodes = job.graph.nodes_of(job.plan.stages[s].ops)
            module = found[s] = build_stage(job.captured, nodes, device=device, shards=teams.shards.get(s))
            counted = known.counts.module.named_buffers() if known.counts else ()
            shared = {n: t for n, t in (*counted, *known.named_parameters(), *known.named_buffers()) if n not in own}
            held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
            module.adopt({name: tensor for name, tensor in shared.items() if name in held})
            module.load(shared | dict(constants))
            if job.settings.compile:
                module.compile_with(job.settings.compile)
    return found


def build_optimizers(
    specs: Mapping[int, AbstractOptimizer], modules: Mapping[int, StageModule], elsewhere: Collection[str]
) -> dict[int, torch.optim.Optimizer]:
    """An optimizer for each stage that trains, by its settings; a weight shared by two stages of this device is the first's.

    Args:
        elsewhere: parameters that another device updates.
    """
    out, taken = {}, set()
    for s, module in modules.items():
        own = {name: p for name, p in module.named_parameters() if p.requires_grad and p not in taken and name not in elsewhere}
        taken.update(own.values())
        if own:
            out[s] = specs[s].build_named(own.items())
    return out


def build_checkpointer(
    own: OwnDevice, run_dir: Path, optimizers: Iterable[torch.optim.Optimizer], split: SplitWeights, hooks: Sequence[Hooks]
) -> Checkpointer:
    """A device's share of every checkpoint.

    Args:
        split: which weights are shares, of stages whose replicas are several devices.
        hooks: of the mechanisms, which may have something to keep; the first rank saves that.
    """
    job, modules = own.job, own.modules.values()
    params = {name: p for module in modules for name, p in module.named_parameters()}
    weights = {**params, **{name: b for module in modules for name, b in module.named_buffers()}}
    owned = owned_names(job, own.device_id, weights) if job.settings.checkpoint_every else frozenset[str]()
    kept = {name: tensor for each in hooks for name, tensor in each.kept().items()}
    rank = job.plan.devices.index(own.device_id)
    return Checkpointer(
        job,
        run_dir,
        rank=rank,
        world=job.plan.num_devices,
        weights=weights | kept,
        optimizers=list(optimizers),
        owned=owned if rank else owned | kept.keys(),
        split=split,
    )


def build_mailboxes(
    own: OwnDevice, modules: Mapping[int, StageModule], program: Program, hooks: Sequence[Hooks]
) -> dict[int, Mailbox]:
    """A mailbox for each stage of a device.

    Args:
        modules: of the stages, in training or evaluation.
        program: whose messages they are.
        hooks: of the mechanisms, which may have messages of their own.
    """
    job = own.job
    out: dict[int, Mailbox] = {}
    for s, module in modules.items():
        messages = boundary(job.plan, job.graph, module, s)
        for each in hooks:
            messages = each.boundary(s, messages)
        out[s] = Mailbox(
            stage=s,
            device_id=own.device_id,
            transport=own.transport,
            device=own.device,
            boundary=messages,
            handover=own.handover,
            sends=sending(program.actions[own.device_id], s),
        )
    return out


def all_ring_sizes(
    job: Job, device_id: int, training: Interpreter[StageRunner], evaluation: Interpreter[StageRunner] | None
) -> dict[Channel, RingSize]:
    """Room for the messages of training and of evaluation."""
    out: dict[Channel, RingSize] = {}
    for program, interpreter in ((job.program, training), (job.evaluation, evaluation)):
        if program and interpreter:
            boundaries = {s: mailbox.boundary for s, mailbox in interpreter.mailboxes.items() if isinstance(mailbox, Mailbox)}
            sizes = ring_sizes(program.actions[device_id], device_id, lambda a, of=boundaries: of[a.stage].most_bytes(a))
            for channel, size in sizes.items():
                out[channel] = size.merged(out.get(channel, size))
    return out
