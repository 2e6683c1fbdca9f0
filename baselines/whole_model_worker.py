"""The whole model on one device or on each of several."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from baselines.harness import AbstractShare, Harness
from gpp.capture.codec import is_random, operator_of
from gpp.data.base import TARGET
from gpp.graph.captured import Node
from gpp.models.losses import loss as loss_named
from gpp.models.losses import loss_terms
from gpp.models.losses import metric as metric_named
from gpp.routing import Piece
from gpp.runtime.checkpoint.state import copy_into
from gpp.runtime.job import Job
from gpp.runtime.worker.process import connect, disconnect, guarded
from gpp.runtime.worker.seat import generators, pass_seed
from gpp.runtime.worker.stage import Fetch
from gpp.timeline import Event


class WholeModel(AbstractShare):
    """The user's own module, in DistributedDataParallel where there are several ranks.

    Gradients of micro-batches add up; ranks exchange them once, with the last micro-batch.
    """

    def __init__(self, harness: Harness, world: int) -> None:
        self.harness, self.world = harness, world
        job, settings, model = harness.job, harness.job.settings, harness.model
        assert model is not None, "a model in memory has no settings to build it from"
        torch.manual_seed(settings.seed)
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, settings.dtype))
        self.module: torch.nn.Module = model.build()
        torch.set_default_dtype(default)
        copy_into(self.module, load_file(harness.run_dir / "job" / "weights.safetensors"))
        self.module.to(harness.device)
        self.loss = loss_named(model.loss)
        self.metric = metric_named(model.metric) if model.metric else None
        self.optimizer = harness.optimizer.build([p for p in self.module.parameters() if p.requires_grad])
        stage = job.plan.stages[0]
        self.pieces = [p for p in stage.pieces(settings.minibatch_size) if p.device == harness.device_id]
        self.ready_at, self.reduced_bytes = 0.0, 0
        self.parallel = self._parallel() if world > 1 else None
        draws = any(node.kind == "block" or (node.kind == "call" and _draws(node)) for node in job.captured.nodes)
        self.generators = generators(harness.device) if draws else ()

    def _parallel(self) -> DistributedDataParallel:
        read = {node.target for node in self.harness.job.captured.nodes if node.kind == "param"}
        aliases = self.harness.job.captured.aliases
        unused = [n for n, p in self.module.named_parameters() if p.requires_grad and aliases.get(n, n) not in read]
        # DDP waits for ever for the gradient of a parameter that the loss does not read, unless it looks for these.
        parallel = DistributedDataParallel(self.module, find_unused_parameters=bool(unused))

        def hook(state, bucket):  # no annotations: DDP compares them with its classes, and here they are strings
            self.ready_at = time.perf_counter()
            self.reduced_bytes += bucket.buffer().numel() * bucket.buffer().element_size()
            return allreduce_hook(state, bucket)

        parallel.register_comm_hook(None, hook)
        return parallel

    def tensors(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def named(self) -> dict[str, torch.Tensor]:
        aliases = self.harness.job.captured.aliases
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {aliases.get(str(name), str(name)): tensor for name, tensor in tensors}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def buffer_bytes(self) -> int:
        # DDP's buckets hold every gradient once more.
        return sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad) if self.parallel else 0

    def train_step(self) -> dict[str, float]:
        harness = self.harness
        harness.set_rate(self.optimizer)
        rows = harness.rows("train", harness.order())
        totals: dict[str, float] = {}
        for i, piece in enumerate(self.pieces):
            last = i + 1 == len(self.pieces)
            with nullcontext() if last or self.parallel is None else self.parallel.no_sync():
                for name, value in self._microbatch(rows, piece).items():
                    totals[name] = totals.get(name, 0.0) + value
        with harness.timed("U", 0, 0):
            if harness.optimizer.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), harness.optimizer.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return totals

    def _microbatch(self, rows: Fetch, piece: Piece) -> dict[str, float]:
        """Run forward and backward of this rank's samples of a micro-batch; returns its share of each mean loss."""
        harness, clock, microbatch = self.harness, time.perf_counter, piece.microbatch
        settings = harness.job.settings
        share = (piece.hi - piece.lo) / settings.minibatch_size
        for generator in self.generators:
            # Dropout must hide different units on every rank, and must go on in a resumed run as without the break.
            generator.manual_seed(pass_seed(settings.seed, harness.step, 0, microbatch, harness.rank))
        begin = clock()
        inputs, targets = _split(rows(piece.lo, piece.hi))
        terms = loss_terms(self.loss((self.parallel or self.module)(**inputs), targets))
        first, *more = terms.values()
        value = sum(more, start=first) if more else first
        # DDP averages gradients over ranks, where they have to be added up.
        scaled = value if share * self.world == 1 else value * (share * self.world)
        harness.sync()
        self.ready_at, self.reduced_bytes = 0.0, 0
        start = clock()
        scaled.backward()
        harness.sync()
        end = clock()
        harness.events.append(Event(harness.device_id, "F", 0, microbatch, begin, start))
        # Computing ends when the last bucket is full; what follows is waiting for the others.
        computed = self.ready_at or end
        harness.events.append(Event(harness.device_id, "B", 0, microbatch, start, computed))
        if self.reduced_bytes:
            # The bytes that a ring all-reduce moves over each member's link, as in the simulator.
            num_bytes = round(self.reduced_bytes * 2 * (self.world - 1) / self.world)
            harness.events.append(Event(harness.device_id, "R", 0, 0, computed, end, num_bytes))
        # A number on a processor costs nothing; the loss of a card was waited for above.
        numbers = {name: term.item() for name, term in terms.items()}
        harness.check_loss(0, microbatch, numbers)
        return {name: number * share for name, number in numbers.items()}

    def evaluate(self) -> dict[str, float]:
        harness, stage, found = self.harness, self.harness.job.plan.stages[0], dict[str, float]()
        count = harness.job.settings.evaluation_samples
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        # Parts are as large as in training, so that a loss that couples samples means the same.
        for piece in stage.pieces(count):
            if piece.device != harness.device_id:
                continue
            inputs, targets = _split(harness.fetch("test", range(piece.lo, piece.hi)))
            outputs = self.module(**inputs)
            results = loss_terms(self.loss(outputs, targets))
            if self.metric and harness.model is not None:
                results[f"metric:{harness.model.metric}"] = self.metric(outputs, targets)
            for name, value in results.items():
                found[name] = found.get(name, 0.0) + value.item() * (piece.hi - piece.lo) / count
        for module, mode in modes.items():
            module.training = mode
        return found

    def final_state(self) -> dict[int, dict[str, torch.Tensor]]:
        if self.harness.rank:
            return {}
        # Stages hold what the capture has read, and a state dict has no buffer that is not persistent.
        kept = {node.target for node in self.harness.job.captured.nodes if node.kind in ("param", "buffer") and node.persistent}
        return {0: {name: tensor for name, tensor in self.named().items() if name in kept}}


def _draws(node: Node) -> bool:
    return is_random(operator_of(node.target), node.args, node.kwargs)


def _split(values: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and targets, each by its own name."""
    inputs = {name: tensor for name, tensor in values.items() if not name.startswith(TARGET)}
    return inputs, {name.removeprefix(TARGET): tensor for name, tensor in values.items() if name.startswith(TARGET)}


def _run(job: Job, run_dir: Path, rank: int, world: int, device: torch.device) -> None:
    status = connect(job, run_dir, rank, world) if world > 1 else None
    harness = Harness(job, run_dir, rank=rank, device_id=job.plan.stages[0].devices[rank], device=device)
    harness.run(WholeModel(harness, world))
    if status is not None:
        disconnect(status)


def main(run_dir: Path) -> None:
    """The whole process; does not return."""
    guarded(run_dir, _run)
