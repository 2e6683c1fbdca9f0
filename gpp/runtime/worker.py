"""One worker = one device: `python -m gpp.runtime.worker RUN_DIR` under RANK and WORLD_SIZE.

A worker knows no Hydra and imports no user model: it reads the job, cuts its stage out of the captured
graph, loads that stage's weights only, and walks its list of actions for every step.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from safetensors import safe_open

from gpp.capture.stage import StageModule, build_stage
from gpp.data.sampler import minibatch
from gpp.plan import Plan
from gpp.program import Program, reduce_groups
from gpp.routing import pieces
from gpp.runtime.channels import AbstractTransport, TorchTransport
from gpp.runtime.interpreter import Interpreter
from gpp.runtime.job import Job, restore
from gpp.runtime.process import KEPT_STEPS, connect, guarded, write_line
from gpp.runtime.stage import Fetch, Layout, MemoryMeter, StageRunner, layout
from gpp.runtime.state import Slices, save_final, static_bytes

if TYPE_CHECKING:
    from gpp.data.base import Samples

EVALUATION_SENDS = 16
"""Sends under way in an evaluation, which nothing else bounds (a forward-only DAG cannot deadlock on it)."""


class Worker:
    """A device's share of a job.

    Args:
        device_id: the device of the plan that this worker is.
        device: the torch device.
        transport: messages to the other devices.
    """

    def __init__(self, job: Job, run_dir: Path, *, device_id: int, device: torch.device, transport: AbstractTransport) -> None:
        self.job, self.run_dir, self.device_id, self.device, self.transport = job, run_dir, device_id, device, transport
        plan, settings = job.plan, job.settings
        self.stage = plan.stage_of_device[device_id]
        nodes = [node for op in plan.stages[self.stage].ops for node in job.graph.ops[op].nodes]
        self.module: StageModule = build_stage(job.captured, nodes, device=device)
        with safe_open(run_dir / "job" / "weights.safetensors", framework="pt", device=str(device)) as weights:
            self.module.load(Slices(weights))
        self.params = dict(self.module.named_parameters())
        trainable = [p for p in self.params.values() if p.requires_grad]
        self.spec = restore(settings.optimizer)
        self.optimizer = self.spec.build(trainable) if trainable else None
        # A model in memory has no settings; its data needs none.
        self.model, self.data = restore(settings.model) if settings.model else None, restore(settings.data)
        self.samples: dict[str, Samples] = {}
        self.num_train = settings.train_samples
        self.runner = self._runner(self.module, job.program, train=True)
        groups = reduce_groups(plan, job.graph)
        mine = {
            g: ([self.params[name] for name in group.params], len(group.devices))
            for g, group in enumerate(groups)
            if device_id in group.devices
        }
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self.training = Interpreter(
            job.program.actions[device_id],
            self.runner,
            transport,
            reduce_params=mine,
            update=self._update,
            synchronize=self.synchronize,
        )
        self.evaluation = self._evaluation() if job.evaluation else None
        self.step = 0
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)

    def _runner(self, module: StageModule, program: Program, *, train: bool) -> StageRunner:
        lays = _layouts(self.job.plan, self.job, module, self.stage)
        stage = self.job.plan.stages[self.stage]
        own = {
            p.microbatch: (p.lo, p.hi)
            for p in pieces(stage.devices, stage.microbatch_size, program.num_samples)
            if p.device == self.device_id
        }
        return StageRunner(
            module,
            stage=self.stage,
            device_id=self.device_id,
            device=self.device,
            transport=self.transport,
            incoming=lays[0],
            outgoing=lays[1],
            returning_in=lays[2],
            returning_out=lays[3],
            pieces=own,
            num_samples=program.num_samples,
            train=train,
        )

    def _evaluation(self) -> Interpreter:
        program = self.job.evaluation
        assert program is not None
        runner = self._runner(self.module.eval_module(), program, train=False)
        return Interpreter(
            program.actions[self.device_id],
            runner,
            self.transport,
            reduce_params={},
            update=lambda: None,
            synchronize=self.synchronize,
            pending_limit=EVALUATION_SENDS,
        )

    def _update(self) -> None:
        if self.optimizer is None:
            return
        rate = self.spec.lr * self.spec.learning_rate.factor(self.step, self.job.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train_step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its record: step, start and end (seconds), loss where it is known."""
        self.step = step
        settings = self.job.settings
        order = minibatch(step, settings.minibatch_size, self.num_train, settings.seed)
        self.runner.begin(
            self._fetch("train", order, self.module.inputs), lambda m: hash((settings.seed, step, self.stage, m, self.device_id))
        )
        start = time.perf_counter()
        self.training.run()
        end = time.perf_counter()
        self.kept.append({"step": step, "start": start, "end": end, "events": self.training.events})
        return {"step": step, "start": start, "end": end, **{name: value.item() for name, value in self.runner.results.items()}}

    def evaluate(self) -> dict[str, float]:
        """Results on the held-out samples, this device's share of each mean."""
        assert self.evaluation is not None
        runner = self.evaluation.runner
        order = list(range(runner.num_samples))
        runner.begin(self._fetch("test", order, runner.module.inputs), int)
        with torch.no_grad():
            self.evaluation.run()
        return {name: value.item() for name, value in runner.results.items()}

    def _fetch(self, split: str, order: list[int], names: tuple[str, ...]) -> Fetch:
        wanted = set(names)

        if wanted and split not in self.samples:
            # Only the stages that read user inputs, and only the splits that they come to.
            settings = self.job.settings
            self.samples[split] = self.data.load(split, self.model, seed=settings.seed, dtype=settings.dtype)

        def fetch(lo: int, hi: int) -> dict[str, torch.Tensor]:
            found = self.samples[split].fetch(order[lo:hi], wanted)
            return found if self.device.type == "cpu" else {k: v.to(self.device, non_blocking=True) for k, v in found.items()}

        return fetch

    def run(self, out: TextIO) -> None:
        """The whole job: every step, every evaluation, the final weights; one JSON line each to `out`."""
        settings = self.job.settings
        tensors = [*self.params.values(), *self.module.buffers()]
        meter = MemoryMeter({t.untyped_storage().data_ptr() for t in tensors}) if self.device.type == "cpu" else None
        for step in range(settings.steps):
            # The first step is not timed (first touch, lazy initialisation), so it can carry the meter.
            self.runner.meter = meter if step == 0 else None
            write_line(out, self.train_step(step))
            done = step + 1
            if self.evaluation and (done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)):
                write_line(out, {"evaluated": done, **self.evaluate()})
        held = static_bytes(tensors, self.optimizer)
        peak = held + meter.peak_bytes if meter else torch.cuda.max_memory_allocated(self.device)
        result = {"device": self.device_id, "peak_memory_bytes": peak, "steps": list(self.kept)}
        (self.run_dir / "ranks" / f"device_{self.device_id}.json").write_text(json.dumps(result))
        if settings.final_weights and self.device_id == self.job.plan.stages[self.stage].devices[0]:
            save_final(self.run_dir, self.stage, self.module.state_dict())


def _layouts(plan: Plan, job: Job, module: StageModule, stage: int) -> tuple[dict[int, Layout], ...]:
    """Message layouts of a stage: incoming, outgoing, gradients returning in, gradients returning out."""
    incoming, outgoing, returning_in, returning_out = {}, {}, {}, {}
    for (s, t), tensors in plan.edge_tensors(job.graph).items():
        if stage in (s, t):
            specs = [(tensor.name, module.spec(tensor.name)) for tensor in tensors]
            peer = t if stage == s else s
            forward, backward = (outgoing, returning_in) if stage == s else (incoming, returning_out)
            forward[peer], backward[peer] = layout(specs, gradients=False), layout(specs, gradients=True)
    return incoming, outgoing, returning_in, returning_out


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    devices = sorted(job.plan.stage_of_device)
    connect(job, run_dir, rank, world)
    transport = TorchTransport(
        job.plan, job.graph, device=devices[rank], rank_of={d: r for r, d in enumerate(devices)}, backend=job.settings.backend
    )
    worker = Worker(job, run_dir, device_id=devices[rank], device=device, transport=transport)
    with open(run_dir / "ranks" / f"rank_{rank}.jsonl", "w") as out:
        worker.run(out)
    # Nobody closes a connection that another rank still reads from.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    guarded(Path(sys.argv[1]), _run)
