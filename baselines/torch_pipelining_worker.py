"""One worker of the torch.distributed.pipelining engine: `python -m baselines.torch_pipelining_worker RUN_DIR`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from baselines.chain import Chain
from baselines.chain_stage import ChainStage, SharedGradients, evaluate
from baselines.harness import AbstractShare, Harness
from gpp.runtime.job import Job
from gpp.runtime.process import connect, guarded
from gpp.timeline import Event

SPLITS_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that run the gradients of inputs and of weights apart; they detach outputs in place."""


class TimedStage(PipelineStage):
    """A PipelineStage that records what the schedule makes it do: the calls below compute, waiting is outside of them."""

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
        if full_backward:
            self._release(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.submod.harness.timed("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._release(bwd_chunk_id)

    def _release(self, microbatch: int) -> None:
        self.submod.microbatch = microbatch
        self.submod.harness.released(self.submod.key)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("SF", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._noted("SB", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _noted(self, kind: str, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """The schedule starts them at once; how long they take is the transport's affair."""
        if ops:
            harness, now = self.submod.harness, time.perf_counter()
            num_bytes = sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
            harness.events.append(Event(harness.device_id, kind, self.stage_index, microbatch, now, now, num_bytes))
        return ops

    def buffer_bytes(self) -> int:
        """Of the receive buffers, which the runtime allocates for all micro-batches of a step and keeps."""
        infos = [info for per in (self.args_recv_info, self.grad_recv_info) for at in per.values() for info in at]
        buffers = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


class TorchPipeline(AbstractShare):
    """This rank's stage and torch's schedule over it."""

    def __init__(self, harness: Harness, chain: Chain, stage: int) -> None:
        job, name = harness.job, harness.job.settings.engine["schedule"]
        self.harness = harness
        share = job.plan.stages[stage].microbatch_size / job.settings.minibatch_size
        self.stage = ChainStage(harness, chain, stage, scale=share, copies=name in SPLITS_BACKWARD, keeps_inputs=stage > 0)
        self.rank_of = {s: s for s in range(chain.num_stages)}
        trainable = self.stage.trainable()
        self.optimizer = harness.optimizer.build(trainable) if trainable else None
        size, count = self.stage.size, self.stage.num_microbatches
        if stage:
            arriving = tuple(self.stage.empty(tensor, size) for tensor in self.stage.incoming)
        else:
            found = harness.fetch("train", range(size), self.stage.arriving)
            arriving = tuple(found[tensor] for tensor in self.stage.arriving)
        leaving = tuple(self.stage.empty(tensor, size) for tensor in self.stage.outgoing)
        if self.stage.last:
            leaving = (torch.empty((), dtype=getattr(torch, job.settings.dtype), device=harness.device, requires_grad=True),)
        self.pipe = TimedStage(self.stage, stage, chain.num_stages, harness.device, input_args=arriving, output_args=leaving)
        kind = get_schedule_class(name)
        # The stages' losses are shares of the mean over the mini-batch already.
        self.schedule: Any = kind(
            [self.pipe] if issubclass(kind, PipelineScheduleMulti) else self.pipe,  # pyright: ignore[reportArgumentType]
            n_microbatches=count,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )
        self.shared = SharedGradients(harness, [self.stage], self.rank_of)
        # The loss is inside the last stage, which gets its targets as inputs: this one only has to be there.
        self.target = torch.zeros(count, device=harness.device) if self.stage.last else None

    def tensors(self) -> list[Tensor]:
        return self.stage.held()

    def buffer_bytes(self) -> int:
        return self.pipe.buffer_bytes()

    def train_step(self) -> Tensor | None:
        harness, stage = self.harness, self.stage
        found = harness.fetch("train", harness.order(), stage.part.inputs)
        if stage.index == 0:
            args, kwargs = tuple(found[name] for name in stage.arriving), {}
        else:
            args, kwargs = (), found
        self.schedule.step(*args, target=self.target, return_outputs=False, **kwargs)
        self.shared.reduce()
        if self.optimizer is not None:
            with harness.timed("U", stage.index, 0):
                harness.set_rate(self.optimizer)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return stage.take_loss()

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.harness, [self.stage], self.rank_of)

    def final_state(self) -> dict[int, dict[str, Tensor]]:
        return {self.stage.index: self.stage.part.state_dict()}


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    connect(job, run_dir, rank, world)
    chain = Chain.of(job.plan, job.graph)
    harness = Harness(job, run_dir, rank=rank, device_id=chain.devices[rank], device=device)
    harness.run(TorchPipeline(harness, chain, rank))
    # Nobody closes a connection that another rank still reads from.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    guarded(Path(sys.argv[1]), _run)
