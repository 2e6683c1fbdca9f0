"""A stage of a chain as a module: from the tensors at the boundary before it to those at the boundary behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from baselines.harness import Harness
from gpp.capture.stage import StageModule, build_stage
from gpp.graph.captured import is_loss
from gpp.plan.chain import PlanChain
from gpp.program.program import reduce_groups
from gpp.runtime.checkpoint.state import Slices
from gpp.runtime.job import Job
from gpp.runtime.transport.channels import TorchTransport
from gpp.runtime.worker.gradients import Gradients
from gpp.runtime.worker.seat import Seat, generators, pass_seed
from gpp.runtime.worker.stage import Fetch
from gpp.timeline import Event

EVALUATION_SENDS = 16
"""Sends under way in an evaluation."""


class _Entering(torch.autograd.Function):
    """The identity with a contiguous gradient, which gloo requires of tensors that it sends."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def nodes_of(job: Job, stage: int) -> list[str]:
    """The captured nodes of a stage's operators."""
    return [node for op in job.plan.stages[stage].ops for node in job.graph.ops[op].nodes]


class ChainStage(torch.nn.Module):
    """One stage of a plan run as a chain, with the same captured module as `engine=distributed` has.

    `forward(*arriving, **inputs)` runs the micro-batch that `microbatch` says and returns a tuple in the order of
    `outgoing`; the last stage returns its loss times `scale`.

    Args:
        stage: number of the stage in the plan.
        scale: the engine's factor of a micro-batch's mean loss.
        copies: whether to return copies of views and inputs, for an engine that detaches outputs in place.
    """

    def __init__(self, harness: Harness, chain: PlanChain, stage: int, *, scale: float, copies: bool = False) -> None:
        super().__init__()
        self.harness, self.index, self.scale, self.copies = harness, stage, scale, copies
        self.part = build_stage(harness.job.captured, nodes_of(harness.job, stage), device=harness.device)
        with safe_open(harness.run_dir / "job" / "weights.safetensors", framework="pt", device=str(harness.device)) as weights:
            self.part.load(Slices(weights))
        self.incoming, self.outgoing = chain.incoming(stage), chain.outgoing(stage)
        self.arriving = self.incoming if stage else self.part.inputs
        self.last = stage + 1 == chain.num_stages
        self.size = harness.job.plan.stages[stage].microbatch_size
        self.share = self.size / harness.job.settings.minibatch_size
        self.num_microbatches = harness.job.settings.minibatch_size // self.size
        self.microbatch = 0
        self.losses: dict[str, Tensor] = {}
        self._step: int | None = None
        self._columns: Fetch = lambda lo, hi: {}
        self.generators = generators(harness.device) if self.part.has_random else ()
        self.evaluation = self.part.eval_module() if harness.job.settings.evaluation_samples else None

    def forward(self, *arriving: Tensor, **inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        harness, values = self.harness, dict(inputs)
        for name, tensor in zip(self.arriving, arriving, strict=True):
            values[name] = cast(Tensor, _Entering.apply(tensor)) if tensor.requires_grad else tensor
        for generator in self.generators:
            generator.manual_seed(pass_seed(harness.job.settings.seed, harness.step, self.index, self.microbatch, 0))
        values.update(self._numbers())
        values.update(self.part(self.size, values))
        if self.last:
            return self._loss({name: values[name] for name in self.part.results if is_loss(name)}) * self.scale
        return tuple(self._leaving(values[name], arriving) for name in self.outgoing)

    def _numbers(self) -> dict[str, Tensor]:
        """What the loss of the micro-batch is divided by, of the whole mini-batch of the step."""
        if self.part.counts is None:
            return {}
        if self._step != self.harness.step:
            self._step = self.harness.step
            self._columns = self.part.counts.columns(self.harness.fetch("train", self.harness.order(), self.part.counts.reads))
        lo = self.microbatch * self.size
        return self._columns(lo, lo + self.size)

    def _leaving(self, tensor: Tensor, arriving: tuple[Tensor, ...]) -> Tensor:
        tensor = tensor.contiguous()
        if self.copies and (tensor._is_view() or any(tensor is one for one in arriving)):
            return tensor.clone()
        return tensor

    def _loss(self, terms: dict[str, Tensor]) -> Tensor:
        """The loss to differentiate: the sum of the terms, each of which is noted."""
        for name, term in terms.items():
            share = term.detach().double() * self.share
            self.losses[name] = self.losses[name] + share if name in self.losses else share
        self.harness.check_loss(self.index, self.microbatch, terms)
        first, *more = terms.values()
        return sum(more, start=first)

    def take_losses(self) -> dict[str, Tensor]:
        """This step's share of the mean of each loss; empty where another stage makes them."""
        losses, self.losses = self.losses, {}
        return losses

    def empty(self, name: str, samples: int) -> Tensor:
        """An uninitialised tensor like the one called `name`, which requires a gradient if that one does."""
        spec = self.part.spec(name)
        shape = list(spec.shape)
        shape.insert(spec.batch_dim, samples)
        return torch.empty(shape, dtype=spec.dtype, device=self.harness.device, requires_grad=spec.differentiable)

    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers by full name."""
        return {**dict(self.part.named_parameters()), **dict(self.part.named_buffers())}

    def held(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.part.parameters(), *self.part.buffers()]

    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that get a gradient."""
        return [p for p in self.part.parameters() if p.requires_grad]


def evaluate(harness: Harness, stages: list[ChainStage], rank_of: dict[int, int]) -> dict[str, float]:
    """Results on the held-out samples: forwards only, micro-batch by micro-batch, over plain sends and receives.

    The engines' own evaluations run whole mini-batches, so they would leave the last samples out.

    Args:
        stages: stages of this rank, ascending.
        rank_of: stage -> rank.
    """
    settings, totals, here = harness.job.settings, dict[str, Tensor](), {stage.index for stage in stages}
    pending: deque[tuple[dist.Work | None, Tensor]] = deque()
    kept: dict[str, Tensor] = {}
    rows = [_held_out(harness, stage) for stage in stages]
    for lo in range(0, settings.evaluation_samples, stages[0].size):
        hi = min(lo + stages[0].size, settings.evaluation_samples)
        for stage, own in zip(stages, rows, strict=True):
            assert stage.evaluation is not None
            values = own(lo, hi)
            for name in stage.incoming:
                if stage.index - 1 in here:
                    values[name] = kept[name]
                else:
                    values[name] = stage.empty(name, hi - lo)
                    dist.recv(values[name], rank_of[stage.index - 1], tag=stage.index)
            made = stage.evaluation(hi - lo, values)
            for name in stage.evaluation.results:
                value = made[name].double() * ((hi - lo) / settings.evaluation_samples)
                totals[name] = totals[name] + value if name in totals else value
            kept = {name: (made if name in made else values)[name].contiguous() for name in stage.outgoing}
            if stage.outgoing and stage.index + 1 not in here:
                for tensor in kept.values():
                    pending.append((dist.isend(tensor, rank_of[stage.index + 1], tag=stage.index + 1), tensor))
        while len(pending) > EVALUATION_SENDS:
            _wait(pending)
    while pending:
        _wait(pending)
    return {name: value.item() for name, value in totals.items()}


def _held_out(harness: Harness, stage: ChainStage) -> Fetch:
    """Function (lo, hi) -> what a stage reads of those held-out samples."""
    assert stage.evaluation is not None

    def rows(names: tuple[str, ...]) -> Fetch:
        return lambda lo, hi: harness.fetch("test", range(lo, hi), names)

    labels = stage.evaluation.counts.reads if stage.evaluation.counts else ()
    return stage.evaluation.counting(rows(stage.evaluation.inputs), rows(labels), harness.job.settings.evaluation_samples)


def _wait(pending: deque[tuple[dist.Work | None, Tensor]]) -> None:
    work, _ = pending.popleft()
    if work is not None:
        work.wait()


class SharedGradients:
    """Sums of the gradients of parameters that several ranks hold a copy of, and clipping by the norm of all.

    The other systems leave this to their users, or do it only for whole layers that are declared to be tied.
    """

    def __init__(self, harness: Harness, chain: PlanChain, stages: list[ChainStage]) -> None:
        job, rank_of = harness.job, {device: rank for rank, device in enumerate(chain.devices)}
        self.harness, self.stage = harness, stages[0].index
        self.params = {name: p for stage in stages for name, p in stage.part.named_parameters()}
        groups = reduce_groups(job.plan, job.graph)
        self.groups = [g for g, group in enumerate(groups) if harness.device_id in group.devices]
        transport = TorchTransport(job.plan, job.graph, device=harness.device_id, rank_of=rank_of)
        seat = Seat(device_id=harness.device_id, device=harness.device, transport=transport)
        self._make = lambda: Gradients(seat, self.params, groups, clip_norm=harness.optimizer.clip_norm)
        self.gradients = self._make()

    def renew(self) -> None:
        """Prepare a step, for an engine that throws gradients away after its update."""
        if self.groups:
            self.gradients = self._make()

    def reduce(self) -> None:
        """Sum the gradients; every rank has run all its backwards."""
        for group in self.groups:
            self._timed("R", group, lambda group=group: self.gradients.reduce(group))
        self.gradients.settle()

    def clip(self) -> None:
        """Scale all gradients down to the largest norm allowed, if there is one."""
        if self.harness.optimizer.clip_norm is not None:
            self._timed("N", 0, self.gradients.clip)

    def _timed(self, kind: str, number: int, run: Callable[[], int]) -> None:
        start = time.perf_counter()
        num_bytes = run()
        self.harness.sync()
        event = Event(self.harness.device_id, kind, self.stage, number, start, time.perf_counter(), num_bytes)
        self.harness.events.append(event)


def inputs_of(job: Job, stage: int) -> tuple[str, ...]:
    """The user inputs and targets that a stage reads, found without its weights."""
    part: StageModule = build_stage(job.captured, nodes_of(job, stage), device="meta")
    return part.inputs
