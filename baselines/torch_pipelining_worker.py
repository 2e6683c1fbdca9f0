"""One worker of the torch.distributed.pipelining engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from baselines.chain_stage import ChainStage, SharedGradients, evaluate
from baselines.harness import AbstractShare, Harness
from gpp.capture.stage import tie
from gpp.plan.chain import PlanChain
from gpp.runtime.job import Job
from gpp.runtime.worker.process import connect, disconnect, guarded
from gpp.timeline import Event

SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that run the gradients of inputs and of weights apart; they detach outputs in place."""


class TimedStage(PipelineStage):
    """A PipelineStage that records the schedule's calls: the calls below compute, and waiting is outside of them."""

    submod: ChainStage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.microbatch = fwd_chunk_id
        with self.submod.harness.timed("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.submod.harness.timed("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.submod.harness.timed("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("SF", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("SB", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The messages that connect neighbours before the first step, without those of a rank to itself.

        Torch 2.11 has a rank's messages to itself where two neighbouring stages are on one rank (a V of stages), and
        gloo refuses them.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _noted(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The messages that the schedule starts, recorded without a duration, which depends on the transport."""
        if ops:
            harness, now = self.submod.harness, time.perf_counter()
            num_bytes = sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
            harness.events.append(Event(harness.device_id, kind, self.stage_index, microbatch, now, now, num_bytes))
        return ops


class TorchPipeline(AbstractShare):
    """This rank's stages and torch's schedule over them."""

    def __init__(self, harness: Harness, chain: PlanChain) -> None:
        job, name = harness.job, harness.job.settings.engine["schedule"]
        self.harness, self.chain = harness, chain
        size = job.plan.stages[0].microbatch_size
        count, share = job.settings.minibatch_size // size, size / job.settings.minibatch_size
        splits = name in SPLITS_BACKWARD
        # The stages' losses are shares of the mean over the mini-batch already, so torch must not scale them.
        own = chain.stages[harness.rank]
        self.stages = [ChainStage(harness, chain, s, scale=share, copies=splits) for s in own]
        tie(stage.part for stage in self.stages)
        trainable = list(dict.fromkeys(p for stage in self.stages for p in stage.trainable()))
        self.optimizer = harness.optimizer.build(trainable) if trainable else None
        self.pipes = [self._pipe(stage) for stage in self.stages]
        kind = get_schedule_class(name)
        self.schedule: Any = kind(
            self.pipes if issubclass(kind, PipelineScheduleMulti) else self.pipes[0],  # pyright: ignore[reportArgumentType]
            n_microbatches=count,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        self.shared = SharedGradients(harness, chain, self.stages)
        # The loss is inside the last stage, which gets its targets as inputs: torch only needs a function here.
        self.target = torch.zeros(count, device=harness.device) if self.stages[-1].last else None

    def _pipe(self, stage: ChainStage) -> TimedStage:
        """The stage with the shapes of its inputs and outputs; without them torch would run it on garbage."""
        harness, size = self.harness, stage.size
        if stage.index:
            arriving = tuple(stage.empty(name, size) for name in stage.arriving)
        else:
            found = harness.fetch("train", range(size), stage.arriving)
            arriving = tuple(found[name] for name in stage.arriving)
        leaving = tuple(stage.empty(name, size) for name in stage.outgoing)
        if stage.last:
            dtype = getattr(torch, harness.job.settings.dtype)
            leaving = (torch.empty((), dtype=dtype, device=harness.device, requires_grad=True),)
        return TimedStage(stage, stage.index, self.chain.num_stages, harness.device, input_args=arriving, output_args=leaving)

    def tensors(self) -> list[Tensor]:
        return list(dict.fromkeys(tensor for stage in self.stages for tensor in stage.held()))

    def named(self) -> dict[str, Tensor]:
        return {name: tensor for stage in self.stages for name, tensor in stage.named().items()}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer] if self.optimizer else []

    def train_step(self) -> dict[str, Tensor]:
        harness, first = self.harness, self.stages[0]
        names = {name for stage in self.stages for name in stage.part.inputs}
        found = harness.fetch("train", harness.order(), names)
        # The first stage takes its inputs by position; torch hands named inputs to all stages of the rank.
        args = tuple(found[name] for name in first.arriving) if first.index == 0 else ()
        later = {name for stage in self.stages if stage.index for name in stage.part.inputs}
        kwargs = {name: found[name] for name in sorted(later)}
        self.schedule.step(*args, target=self.target, return_outputs=False, **kwargs)
        self.shared.reduce()
        self.shared.clip()
        if self.optimizer is not None:
            with harness.timed("U", first.index, 0):
                harness.set_rate(self.optimizer)
                self.optimizer.step()
                self.shared.gradients.clear()
        return self.stages[-1].take_losses()

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.harness, self.stages, self.chain.rank_of)

    def final_state(self) -> dict[int, dict[str, Tensor]]:
        return {stage.index: stage.part.state_dict() for stage in self.stages}


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    status = connect(job, run_dir, rank, world)
    chain = PlanChain.of(job.plan, job.graph)
    harness = Harness(job, run_dir, rank=rank, device_id=chain.devices[rank], device=device)
    harness.run(TorchPipeline(harness, chain))
    disconnect(status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
