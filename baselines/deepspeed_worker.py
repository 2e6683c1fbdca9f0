"""One worker of the DeepSpeed engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baselines.chain_stage import ChainStage, SharedGradients, evaluate, inputs_of
from baselines.harness import AbstractShare, Harness
from baselines.packing import Packing
from gpp.plan.chain import PlanChain
from gpp.runtime.job import Job
from gpp.runtime.worker.process import connect, disconnect, guarded

NEVER = 1 << 60
"""Steps between two of DeepSpeed's own reports."""


class Layer(torch.nn.Module):
    """A stage as a layer of a PipelineModule: it takes messages and returns messages, or the loss in the last stage.

    A stage gets only the output of the one before it, so inputs that stages between the first and the last read travel
    with the tensors. The last stage gets its inputs as labels.

    Args:
        boundaries: boundary -> the user inputs that cross it, after the chain's own tensors.
    """

    def __init__(self, harness: Harness, chain: PlanChain, stage: int, boundaries: list[tuple[str, ...]]) -> None:
        super().__init__()
        # DeepSpeed divides the loss by the number of micro-batches itself.
        self.stage = ChainStage(harness, chain, stage, scale=1.0)
        examples = self._examples(harness, sorted({name for names in boundaries for name in names}))
        before = boundaries[stage - 1] if stage else ()
        after = boundaries[stage] if stage < len(boundaries) else ()
        self.read = tuple(dict.fromkeys((*self.stage.arriving, *after))) if stage == 0 else (*self.stage.incoming, *before)
        self.made = (*self.stage.outgoing, *after)
        self.passed = after
        size = self.stage.size
        self.arriving = Packing([self._example(name, size, examples) for name in self.read]) if stage else None
        self.leaving = None if self.stage.last else Packing([self._example(name, size, examples) for name in self.made])
        self.labels: dict[str, Tensor] = {}
        # DeepSpeed accepts no stage without a parameter to train.
        zero = torch.zeros(1, dtype=getattr(torch, harness.job.settings.dtype), device=harness.device)
        self.anchor = None if self.stage.trainable() else torch.nn.Parameter(zero)

    def _examples(self, harness: Harness, names: list[str]) -> dict[str, Tensor]:
        return harness.fetch("train", range(self.stage.size), names)

    def _example(self, name: str, size: int, inputs: dict[str, Tensor]) -> Tensor:
        return inputs[name] if name in inputs else self.stage.empty(name, size)

    def forward(self, messages: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        given = messages if isinstance(messages, tuple) else (messages,)
        values = dict(zip(self.read, self.arriving.unpack(given) if self.arriving else given, strict=True))
        extra = {name: values[name] for name in self.read if name not in self.stage.arriving}
        made = self.stage(*(values[name] for name in self.stage.arriving), **extra, **self.labels)
        if self.leaving is None:
            return made
        return self.leaving.pack((*made, *(values[name] for name in self.passed)))


class DeepSpeedPipeline(AbstractShare):
    """This rank's stage inside DeepSpeed's engine."""

    def __init__(self, harness: Harness, chain: PlanChain, rank: int) -> None:
        os.environ["DS_ACCELERATOR"] = harness.device.type
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule

        # Its shared-memory all-reduce would be compiled at the first start, for minutes and in silence, for no use.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        deepspeed.init_distributed(dist_backend=harness.job.settings.backend)
        self.harness, self.chain, job = harness, chain, harness.job
        boundaries = carried_inputs(job, chain)
        # Only the rank that owns a specification builds it.
        specs = [LayerSpec(Layer, harness, chain, s, boundaries) for s in range(chain.num_stages)]
        self.pipe = PipelineModule(layers=specs, num_stages=chain.num_stages, partition_method="uniform")
        layer = self.pipe.forward_funcs[0]
        assert len(self.pipe.forward_funcs) == 1 and isinstance(layer, Layer) and layer.stage.index == rank
        self.layer, self.stage = layer, layer.stage
        params = [p for p in layer.parameters() if p.requires_grad]
        for param in params:
            # Its norm of all gradients leaves out every stage but the first, except parameters that say they are split.
            param.model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer = harness.optimizer.build(params)
        self.engine: Any = deepspeed.initialize(
            model=self.pipe,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": self.stage.size,
                "gradient_accumulation_steps": self.stage.num_microbatches,
                # Without this line it clips at 1.0.
                "gradient_clipping": harness.optimizer.clip_norm or 0.0,
                "zero_optimization": {"stage": 0},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": NEVER,
            },
        )[0]
        # A stage has one replica: averaging over it would only copy the gradients, and refuses float64.
        self.engine.pipeline_enable_backward_allreduce = False
        self.shared = SharedGradients(harness, chain, [self.stage])
        self.counts = {"F": 0, "B": 0, "SF": 0, "SB": 0}
        self.engine._INSTRUCTION_MAP = self._instructions()

    def _instructions(self) -> dict[type, Callable[..., None]]:
        """DeepSpeed's own instructions; those that compute or send are recorded as events."""
        from deepspeed.runtime.pipe import schedule

        own = dict(type(self.engine)._INSTRUCTION_MAP)
        out = dict(own)
        out[schedule.ForwardPass] = self._counted("F", own[schedule.ForwardPass])
        out[schedule.BackwardPass] = self._counted("B", own[schedule.BackwardPass])
        out[schedule.SendActivation] = self._counted("SF", own[schedule.SendActivation])
        out[schedule.SendGrad] = self._counted("SB", own[schedule.SendGrad])
        out[schedule.ReduceTiedGrads] = lambda engine: self.shared.reduce()
        out[schedule.OptimizerStep] = self._update(own[schedule.OptimizerStep])
        return out

    def _counted(self, kind: str, run: Callable[..., None]) -> Callable[..., None]:
        """The instruction with a clock; every kind meets the micro-batches in their order."""

        def timed(engine: Any, buffer_id: int) -> None:
            microbatch = self.counts[kind]
            self.counts[kind] += 1
            if kind == "F":
                self._load(engine, buffer_id, microbatch)
            with self.harness.timed(kind, self.stage.index, microbatch, self._num_bytes(kind, engine, buffer_id)):
                run(engine, buffer_id)

        return timed

    def _load(self, engine: Any, buffer_id: int, microbatch: int) -> None:
        self.stage.microbatch = microbatch
        if self.stage.last:
            self.layer.labels = dict(zip(self.stage.part.inputs, engine.pipe_buffers["labels"][buffer_id], strict=True))

    def _num_bytes(self, kind: str, engine: Any, buffer_id: int) -> int:
        if kind == "SF":
            return sum(t.numel() * t.element_size() for t in engine.pipe_buffers["outputs"][buffer_id])
        if kind == "SB":
            messages = engine.pipe_buffers["inputs"][buffer_id]
            return sum(t.numel() * t.element_size() for t in messages if t.is_floating_point())
        return 0

    def _update(self, run: Callable[..., None]) -> Callable[..., None]:
        def timed(engine: Any, **kwargs: Any) -> None:
            if self.layer.anchor is not None:
                # Its clipping fails where no parameter has a gradient.
                self.layer.anchor.grad = torch.zeros_like(self.layer.anchor)
            with self.harness.timed("U", self.stage.index, 0):
                run(engine, **kwargs)

        return timed

    def tensors(self) -> list[Tensor]:
        return self.stage.held()

    def named(self) -> dict[str, Tensor]:
        return self.stage.named()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def train_step(self) -> dict[str, Tensor]:
        self.counts = dict.fromkeys(self.counts, 0)
        self.harness.set_rate(self.optimizer)
        self.shared.renew()
        self.engine.train_batch(self._batches())
        return self.stage.take_losses()

    def _batches(self) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Micro-batches in DeepSpeed's form: (inputs of the first stage, inputs of the last one); others read none."""
        order, size, stage = self.harness.order(), self.stage.size, self.stage
        rows = self.harness.rows("train", order, {*(self.layer.read if stage.index == 0 else ()), *self._labels()})
        for lo in range(0, len(order), size):
            found = rows(lo, lo + size)
            first = tuple(found[name] for name in self.layer.read) if stage.index == 0 else ()
            yield first, tuple(found[name] for name in self._labels())

    def _labels(self) -> tuple[str, ...]:
        return self.stage.part.inputs if self.stage.last else ()

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.harness, [self.stage], self.chain.rank_of)

    def final_state(self) -> dict[int, dict[str, Tensor]]:
        return {self.stage.index: self.stage.part.state_dict()}


def carried_inputs(job: Job, chain: PlanChain) -> list[tuple[str, ...]]:
    """Boundary -> the user inputs that cross it, since only the first and the last stage read data."""
    reach: dict[str, int] = {}
    for stage in range(1, chain.num_stages - 1):
        reach.update(dict.fromkeys(inputs_of(job, stage), stage))
    return [tuple(name for name in sorted(reach) if boundary < reach[name]) for boundary in range(chain.num_stages - 1)]


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    status = connect(job, run_dir, rank, world)
    chain = PlanChain.of(job.plan, job.graph)
    harness = Harness(job, run_dir, rank=rank, device_id=chain.devices[rank], device=device)
    harness.run(DeepSpeedPipeline(harness, chain, rank))
    disconnect(status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
