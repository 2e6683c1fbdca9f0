"""The single-device reference as a worker process: `python -m gpp.runtime.single_worker RUN_DIR`."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file

from gpp.data.sampler import minibatch
from gpp.models.losses import loss as loss_named
from gpp.models.losses import metric as metric_named
from gpp.runtime.job import Job, restore
from gpp.runtime.meter import MemoryMeter
from gpp.runtime.process import KEPT_STEPS, guarded, write_line
from gpp.runtime.state import copy_into, save_final, static_bytes
from gpp.timeline import Event


class SingleWorker:
    """The whole model on one device."""

    def __init__(self, job: Job, run_dir: Path, device: torch.device) -> None:
        self.job, self.run_dir, self.device = job, run_dir, device
        settings = job.settings
        self.spec = restore(settings.model)
        torch.manual_seed(settings.seed)
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, settings.dtype))
        self.module = self.spec.build().train()
        torch.set_default_dtype(default)
        copy_into(self.module, load_file(run_dir / "job" / "weights.safetensors"))
        self.module.to(device)
        self.loss = loss_named(self.spec.loss)
        self.metric = metric_named(self.spec.metric) if self.spec.metric else None
        optimizer = restore(settings.optimizer)
        self.rate, self.lr, self.clip_norm = optimizer.learning_rate, optimizer.lr, optimizer.clip_norm
        self.optimizer = optimizer.build([p for p in self.module.parameters() if p.requires_grad])
        data = restore(settings.data)
        self.samples = {split: data.load(split, self.spec, seed=settings.seed, dtype=settings.dtype) for split in ("train", "test")}
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)

    def _batch(self, split: str, order: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        values = {name: t.to(self.device) for name, t in self.samples[split].fetch(order).items()}
        inputs = {name: t for name, t in values.items() if not name.startswith("target:")}
        return inputs, {name.removeprefix("target:"): t for name, t in values.items() if name.startswith("target:")}

    def train_step(self, step: int, meter: MemoryMeter | None) -> dict[str, Any]:
        """One optimizer step on a whole mini-batch."""
        settings, clock = self.job.settings, time.perf_counter
        order = minibatch(step, settings.minibatch_size, settings.train_samples, settings.seed)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.rate.factor(step, settings.steps)
        start = clock()
        inputs, targets = self._batch("train", order)
        if meter:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: meter.note(0, 0, t.detach()), lambda t: t):
                value = self.loss(self.module(**inputs), targets)
            meter.update()
        else:
            value = self.loss(self.module(**inputs), targets)
        self._sync()
        forward = clock()
        value.backward()
        self._sync()
        backward = clock()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._sync()
        end = clock()
        self.kept.append(
            {
                "step": step,
                "start": start,
                "end": end,
                "events": [
                    Event(0, "F", 0, 0, start, forward),
                    Event(0, "B", 0, 0, forward, backward),
                    Event(0, "U", 0, 0, backward, end),
                ],
            }
        )
        return {"step": step, "start": start, "end": end, "loss": value.item()}

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def evaluate(self) -> dict[str, float]:
        """Loss and metric over the held-out samples."""
        self.module.eval()
        with torch.no_grad():
            inputs, targets = self._batch("test", list(range(self.job.settings.evaluation_samples)))
            outputs = self.module(**inputs)
            found = {"loss": self.loss(outputs, targets).item()}
            if self.metric and self.spec.metric:
                found[f"metric:{self.spec.metric}"] = self.metric(outputs, targets).item()
        self.module.train()
        return found

    def run(self, out: TextIO) -> None:
        """The whole job."""
        settings = self.job.settings
        tensors = [*self.module.parameters(), *self.module.buffers()]
        meter = MemoryMeter({t.untyped_storage().data_ptr() for t in tensors}) if self.device.type == "cpu" else None
        for step in range(settings.steps):
            write_line(out, self.train_step(step, meter if step == 0 else None))
            done = step + 1
            if settings.evaluation_samples and (
                done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)
            ):
                write_line(out, {"evaluated": done, **self.evaluate()})
        held = static_bytes(tensors, [self.optimizer])
        peak = held + meter.peak_bytes if meter else torch.cuda.max_memory_allocated(self.device)
        result = {"device": 0, "peak_memory_bytes": peak, "steps": list(self.kept)}
        (self.run_dir / "ranks" / "device_0.json").write_text(json.dumps(result))
        if settings.final_weights:
            save_final(self.run_dir, 0, {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())})


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    with open(run_dir / "ranks" / "rank_0.jsonl", "w") as out:
        SingleWorker(job, run_dir, device).run(out)


if __name__ == "__main__":
    guarded(Path(sys.argv[1]), _run)
