"""Loop that follows a pipeline in one process: by mini-batches and stages, on the weights of the version table.

The forward of a micro-batch uses a version that exists before its mini-batch's update, and so does its backward. So a
mini-batch can be finished before the next one begins, whatever the real pipeline has in flight, and all sums come in
the same order: equal bit for bit, except for sums over more than two devices, whose order is the backend's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from baselines.reference.divided import in_parts
from baselines.reference.stage import FollowedStage, Kept, Table, advance
from gpp.capture.stage import StageModule, build_stage, tie
from gpp.data.sampler import minibatch
from gpp.errors import NonFinite
from gpp.graph.captured import is_loss
from gpp.mechanisms.helpers.operands import head_of_stage
from gpp.mechanisms.helpers.stage import columns, helpers_of
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.stash import Stash
from gpp.routing import Piece, pieces
from gpp.runtime.engine import GRADIENT_NORM, task_of
from gpp.runtime.job import Job, restore
from gpp.runtime.nonfinite import PassPlace, Seen, told, told_of_weights
from gpp.runtime.stretches import stretch_at
from gpp.runtime.worker.seat import pass_seed
from gpp.weights.base import PipelinePosition

if TYPE_CHECKING:
    from gpp.data.base import Samples

Rows = Callable[[int, int, Sequence[str]], dict[str, Tensor]]
"""Function (lo, hi, names) -> user inputs and targets of those samples of a mini-batch or an evaluation."""

Parts = list[tuple[int, Tensor]]
"""A tensor of several pieces, batch first: (first sample, rows)."""

Chunk = list[list[Piece]]
"""Stage -> pieces of the same samples."""


class Pipeline:
    """The stages of a job's plan, and the loop over them.

    Args:
        weights: initial ones, by full name.
        warn: is called once if a loss or weights are not finite, with `on_nonfinite=warn`.
    """

    def __init__(self, job: Job, weights: Mapping[str, Tensor], warn: Callable[[str], None] = print) -> None:
        self.job, settings, plan = job, job.settings, job.plan
        self._warn, self._told, self._done = warn, False, settings.first_step
        self.spec = restore(settings.optimizer)
        self.norm: dict[str, float] = {}
        """The norm of all gradients of the step, where it was taken."""
        # A pipeline that drains is one in which no micro-batch is ahead of an update: it keeps nothing.
        self.policy: AbstractVersionPolicy = restore(settings.weights) if settings.weights else Stash()
        self.model, self.data = restore(settings.model) if settings.model else None, restore(settings.data)
        modules: list[list[StageModule]] = []
        for s, stage in enumerate(plan.stages):
            nodes = [node for op in stage.ops for node in job.graph.ops[op].nodes]
            modules.append([build_stage(job.captured, nodes, device="cpu") for _ in stage.devices])
            for module in modules[-1]:
                module.load(weights)
                if helpers_of(stage).input_share:
                    head = head_of_stage(job.plan, s, task_of(job))
                    parts = in_parts([(lo, hi) for _, lo, hi in columns(stage, head.columns)])
                    module.call_through({head.node: parts})
        tie(module for replicas in modules for module in replicas)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stages = self._stages(modules)
        self.sums = self._sums()
        self.order: dict[str, tuple[int, int]] = {}
        """Tensor that crosses a boundary -> where its batch dimension goes, and the stage that makes it."""
        self.differentiable: set[str] = set()
        self.incoming: list[list[str]] = [[] for _ in plan.stages]
        self.returning: list[list[tuple[int, list[str]]]] = [[] for _ in plan.stages]
        self._boundaries()
        self.chunks = self._chunks(plan.minibatch_size)
        self._samples: dict[str, Samples] = {}

    def _stages(self, modules: list[list[StageModule]]) -> list[FollowedStage]:
        plan, out, taken = self.job.plan, [], set[Tensor]()
        for s, replicas in enumerate(modules):
            masters = [p for p in replicas[0].parameters() if p.requires_grad]
            # A weight that several stages share is one tensor here, of the first of them.
            own = [p for p in masters if p not in taken]
            taken.update(own)
            position = plan.position(s) if self.job.streams else replace(plan.position(s), warmup=0)
            spec = self.policy.optimizer_at(self.spec, position)
            optimizer = spec.build(own) if own else None
            self.optimizers += [optimizer] if optimizer else []
            rate = self._rate_of(position)
            table = Table(self.policy, position, masters, optimizer=optimizer, spec=spec, rate=rate) if masters else None
            runs_backward = plan.runs_backward(s, self.job.graph)
            last = 4 * sum(1 for _ in pieces(plan.stages[s].devices, plan.stages[s].microbatch_size, plan.minibatch_size))
            out.append(FollowedStage(replicas, masters, runs_backward=runs_backward, table=table, last=last))
        return out

    def _sums(self) -> list[tuple[Tensor, list[tuple[int, int, int, int]]]]:
        """Each trained parameter, and where its gradients are made: (device, stage, replica, place), by device."""
        found: dict[Tensor, list[tuple[int, int, int, int]]] = defaultdict(list)
        for s, stage in enumerate(self.stages):
            for replica, device in enumerate(self.job.plan.stages[s].devices):
                for i, master in enumerate(stage.masters):
                    found[master].append((device, s, replica, i))
        return [(master, sorted(holders)) for master, holders in found.items()]

    def _boundaries(self) -> None:
        plan, graph = self.job.plan, self.job.graph
        for (s, t), tensors in plan.edge_tensors(graph).items():
            names = [tensor.name for tensor in tensors]
            for name in names:
                spec = self.stages[s].modules[0].spec(name)
                self.order[name] = spec.batch_dim, s
                self.differentiable |= {name} if spec.differentiable else set()
            self.incoming[t] += names
            if returned := [name for name in names if name in self.differentiable]:
                self.returning[s].append((t, returned))
                self.stages[s].seeded.update(returned)

    def _chunks(self, total: int) -> list[Chunk]:
        """Cut samples where all stages' micro-batches begin anew, so that no more than needed is held at a time."""
        plan = self.job.plan
        size = math.lcm(*(stage.microbatch_size for stage in plan.stages))
        out: list[Chunk] = [[[] for _ in plan.stages] for _ in range(-(-total // size))]
        for s, stage in enumerate(plan.stages):
            for piece in pieces(stage.devices, stage.microbatch_size, total):
                out[piece.lo // size][s].append(piece)
        return out

    def rate(self, update: int) -> float:
        """The learning rate of an update."""
        return self.spec.lr * self.spec.learning_rate.factor(update, self.job.settings.steps)

    def _rate_of(self, position: PipelinePosition) -> Callable[[int], float]:
        """The learning rate of an update of a stage."""
        correction, delay = self.policy.corrects(position), self.policy.staleness(position)
        return lambda update: self.rate(update) * (correction.rate(delay, update) if correction else 1.0)

    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers by full name; of buffers, which replicas have each their own, the first replica's."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            stage.settle()
            found |= {**dict(stage.modules[0].named_parameters()), **dict(stage.modules[0].named_buffers())}
        return found

    def final_state(self) -> dict[int, dict[str, Tensor]]:
        """Stage -> its tensors by full name, as its first device holds them."""
        for stage in self.stages:
            stage.settle()
        return {s: stage.modules[0].state_dict() for s, stage in enumerate(self.stages)}

    def stretches(self) -> Iterator[tuple[int, int]]:
        """First step and number of steps of each stretch; between two of them the pipeline is empty."""
        step = self.job.settings.first_step
        while step < self.job.settings.steps:
            first, count = stretch_at(self.job, step)
            yield first, count
            step = first + count

    def train(self, first: int, count: int) -> Iterator[dict[str, float]]:
        """One stretch; yields the results of each step, as means over the mini-batch."""
        settings = self.job.settings
        for stage in self.stages:
            if stage.table:
                stage.table.begin(first, count)
        for step in range(first, first + count):
            indices = torch.tensor(minibatch(step, settings.minibatch_size, settings.train_samples, settings.seed))
            rows, results = self._rows("train", indices), defaultdict[int, dict[str, Tensor]](dict)
            for chunk in self.chunks:
                self._backward(chunk, step, self._forward(chunk, step, rows, results))
            self._update(step)
            yield self._total(results) | self.norm
        self._done = first + count
        for stage in self.stages:
            stage.settle()

    def _rows(self, split: str, indices: Tensor) -> Rows:
        settings = self.job.settings
        if split not in self._samples:
            self._samples[split] = self.data.load(split, self.model, seed=settings.seed, dtype=settings.dtype)
        samples = self._samples[split]
        everything = {name for stage in self.stages for name in stage.inputs} if samples.in_memory else set[str]()
        whole = samples.fetch(indices, everything) if everything else {}
        counted = [stage.modules[0].counts for stage in self.stages]
        labels = {name for counts in counted if counts for name in counts.reads}

        def rows(lo: int, hi: int, names: Collection[str]) -> dict[str, Tensor]:
            if not samples.in_memory:
                return samples.fetch(indices[lo:hi], set(names))
            return {name: whole[name][lo:hi] for name in names}

        known = rows(0, len(indices), labels) if labels else {}
        numbers = [counts.columns(known) for counts in counted if counts]
        return lambda lo, hi, names: {
            **rows(lo, hi, names),
            **{name: column for of in numbers for name, column in of(lo, hi).items()},
        }

    def _forward(self, chunk: Chunk, step: int, rows: Rows, results: dict[int, dict[str, Tensor]]) -> list[list[Kept]]:
        """The forwards of all stages on the samples of a chunk; adds to the results of each device."""
        plan, settings, made, kept = self.job.plan, self.job.settings, defaultdict[str, Parts](list), []
        for s, stage in enumerate(self.stages):
            kept.append([])
            count = stage.table.position.accumulation if stage.table else 0
            for device, microbatch, lo, hi in chunk[s]:
                received = {}
                for name in self.incoming[s]:
                    tensor = self._placed(name, _cut(made[name], lo, hi))
                    received[name] = tensor.requires_grad_(stage.runs_backward and name in self.differentiable)
                replica = plan.stages[s].devices.index(device)
                if stage.modules[replica].has_random:
                    torch.manual_seed(pass_seed(settings.seed, step, s, microbatch, replica))
                share = (hi - lo) / plan.minibatch_size
                found, values = stage.forward(
                    replica, step * count + microbatch, hi - lo, received, rows(lo, hi, stage.inputs), share
                )
                _add(results[device], values)
                for name, tensor in found.outputs.items():
                    made[name].append((lo, self._batch_first(name, tensor.detach())))
                kept[-1].append(found)
                for name, value in values.items():
                    if is_loss(name) and not math.isfinite(number := value.item()):
                        place = PassPlace(step=step, sample=lo, end=hi, microbatch=microbatch)
                        self._nonfinite(Seen(name=name, value=number, stage=s, place=place), chunk, kept, rows, (lo, hi))
        return kept

    def _backward(self, chunk: Chunk, step: int, kept: list[list[Kept]]) -> None:
        """The backwards of all stages, on the tensors that `_forward` kept."""
        made = defaultdict[tuple[int, str], Parts](list)
        for s in reversed(range(len(self.stages))):
            stage = self.stages[s]
            if not stage.runs_backward:
                continue
            for (device, microbatch, lo, hi), found in zip(chunk[s], kept[s], strict=True):
                gradients: dict[str, Tensor] = {}
                for t, names in self.returning[s]:
                    for name in names:
                        grad = self._placed(name, _cut(made[t, name], lo, hi))
                        gradients[name] = gradients[name] + grad if name in gradients else grad
                place = PassPlace(step=step, sample=lo, end=hi, microbatch=microbatch)
                stage.backward(self.job.plan.stages[s].devices.index(device), found, gradients, place)
                for name, leaf in found.received.items():
                    if leaf.requires_grad:
                        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                        made[s, name].append((lo, self._batch_first(name, grad)))

    def _nonfinite(self, seen: Seen, chunk: Chunk, kept: list[list[Kept]], rows: Rows, samples: tuple[int, int]) -> None:
        """A loss is not finite: look at what the stages have kept of its samples."""
        if self._told:
            return
        found = [stage.finding(s) for s, stage in enumerate(self.stages)]
        for s, own in enumerate(kept):
            # Of the last stage, only the pieces up to this one.
            for (_, microbatch, lo, hi), made in zip(chunk[s], own, strict=False):
                if max(lo, samples[0]) < min(hi, samples[1]):
                    place = PassPlace(step=seen.place.step, sample=lo, end=hi, microbatch=microbatch)
                    found.append(self.stages[s].finding(s, place, made, rows(lo, hi, self.stages[s].inputs)))
        self._end(told(seen, found, first_step=self.job.settings.first_step))

    def check_weights(self) -> None:
        """Look at the weights after the last step, which no loss has seen.

        Raises:
            NonFinite: they are not finite, and the run is to stop then.
        """
        found = [stage.finding(s) for s, stage in enumerate(self.stages)]
        if any(finding.weights for finding in found):
            self._end(told_of_weights(found, step=self.job.settings.steps - 1))

    def _end(self, text: str) -> None:
        if self.job.settings.on_nonfinite != "warn":
            raise NonFinite(text)
        if not self._told:
            self._told = True
            self._warn(text)

    def _batch_first(self, name: str, tensor: Tensor) -> Tensor:
        dim = self.order[name][0]
        return tensor.movedim(dim, 0) if dim else tensor

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        dim = self.order[name][0]
        return tensor.movedim(0, dim) if dim else tensor

    def _update(self, step: int) -> None:
        for master, holders in self.sums:
            grads = [self.stages[s].sums[replica][i] for _, s, replica, i in holders]
            total = grads[0]
            if len(holders) > 1:
                # Where several devices add up, one without a gradient adds zeros.
                total = torch.zeros_like(master)
                for grad in grads:
                    total = total if grad is None else total.add_(grad)
            master.grad = total
        if self.spec.clips_model or self.spec.log_gradient_norm:
            self._clip()
        for table in (stage.table for stage in self.stages):
            if table is None or table.optimizer is None:
                continue
            optimizer, rate = table.optimizer, table.rate(step)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for group in optimizer.param_groups:
                group["lr"] = rate
            if self.spec.clip_norm is not None and not self.spec.clips_model:
                clip_grad_norm_(params, self.spec.clip_norm)
            advance(table, rate)
            optimizer.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.clear()
            if stage.table:
                stage.table.updated()

    def _clip(self) -> None:
        """Take the norm of the whole model's gradients, of which each device holds a part, and scale them by it if it is to bound
        them."""
        parts: dict[int, list[Tensor]] = defaultdict(list)
        for master, holders in self.sums:
            if master.grad is not None:
                parts[holders[0][0]].append(master.grad)
        total = torch.zeros(1, dtype=torch.float64)
        for _, grads in sorted(parts.items()):
            total += get_total_norm(grads).double().square()
        norm = total.sqrt()[0]
        self.norm = {GRADIENT_NORM: norm.item()}
        if self.spec.clip_norm is not None and self.spec.clips_model:
            clip_grads_with_norm_([master for master, _ in self.sums], self.spec.clip_norm, norm)

    def evaluate(self) -> dict[str, float]:
        """Results on the held-out samples, with the real weights; the pipeline is empty."""
        assert self.job.evaluation is not None
        plan, size = self.job.plan, self.job.evaluation.num_samples
        rows, results = self._rows("test", torch.arange(size)), defaultdict[int, dict[str, Tensor]](dict)
        with torch.no_grad():
            for chunk in self._chunks(size):
                made = defaultdict[str, Parts](list)
                for s, stage in enumerate(self.stages):
                    for device, _, lo, hi in chunk[s]:
                        module = stage.evaluation[plan.stages[s].devices.index(device)]
                        received = {name: self._placed(name, _cut(made[name], lo, hi)) for name in self.incoming[s]}
                        outputs = module(hi - lo, {**received, **rows(lo, hi, stage.inputs)})
                        shares = {name: outputs.pop(name).double() * ((hi - lo) / size) for name in module.results}
                        self._check_held_out(shares, s, lo, hi)
                        _add(results[device], shares)
                        for name, tensor in outputs.items():
                            made[name].append((lo, self._batch_first(name, tensor)))
        return self._total(results)

    def _check_held_out(self, results: Mapping[str, Tensor], stage: int, lo: int, hi: int) -> None:
        for name, value in results.items():
            if is_loss(name) and not math.isfinite(number := value.item()):
                microbatch = lo // self.job.plan.stages[stage].microbatch_size
                place = PassPlace(step=self._done, sample=lo, end=hi, microbatch=microbatch)
                self._end(Seen(name=name, value=number, stage=stage, place=place).held_out())

    @staticmethod
    def _total(results: Mapping[int, Mapping[str, Tensor]]) -> dict[str, float]:
        out: dict[str, float] = {}
        for _, found in sorted(results.items()):
            for name, value in found.items():
                out[name] = out.get(name, 0.0) + value.item()
        return out


def run_reference(job: Job, weights: Mapping[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Train a job in this process, without files or evaluations; returns each step's loss and the final tensors."""
    pipeline = Pipeline(job, weights)
    losses = [sum(found.values()) for first, count in pipeline.stretches() for found in pipeline.train(first, count)]
    return losses, {name: tensor for state in pipeline.final_state().values() for name, tensor in state.items()}


def _cut(parts: Parts, lo: int, hi: int) -> Tensor:
    """Samples [lo, hi), in memory of their own as if they had been sent."""
    found = [rows[max(lo - at, 0) : hi - at].contiguous() for at, rows in parts if at < hi and lo < at + len(rows)]
    return found[0].clone() if len(found) == 1 else torch.cat(found)


def _add(totals: dict[str, Tensor], shares: Mapping[str, Tensor]) -> None:
    for name, value in shares.items():
        totals[name] = totals[name] + value if name in totals else value
