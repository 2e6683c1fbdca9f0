"""One worker = one device; `main.py` beside this is its process.

A worker knows no Hydra and imports no user model: it reads the job, cuts its stage out of the captured
graph, loads that stage's weights only, and walks its list of actions for every step.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from gpp.capture.stage import StageModule
from gpp.program.kinds import COMPUTE, KINDS, RECEIVES, UPDATES
from gpp.program.program import Program, ReduceGroup, reduce_groups
from gpp.program.sends import Limits, enough_sends
from gpp.program.steady_state import accumulation, fill, of_length
from gpp.runtime.cards.card import AbstractCard
from gpp.runtime.even import EvenOrder
from gpp.runtime.hang_detection.status import CHECKPOINT, EVALUATION, STARTING, TRAINING
from gpp.runtime.job import Job, Settings, owners_of, restore
from gpp.runtime.nonfinite import Probes
from gpp.runtime.torch_optimizer import set_rate
from gpp.runtime.worker.allocator import MemoryEvents, held_by
from gpp.runtime.worker.around import AbstractStageWeights
from gpp.runtime.worker.build import (
    Teams,
    all_ring_sizes,
    build_checkpointer,
    build_mailboxes,
    build_modules,
    build_optimizers,
    slower,
)
from gpp.runtime.worker.gradients import BUCKET_BYTES, Gradients
from gpp.runtime.worker.hooks import OwnDevice, build_hooks, part_of
from gpp.runtime.worker.interpreter import BesidePasses, Interpreter
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.messages import most_sends
from gpp.runtime.worker.process import KEPT_STEPS, Lines, write_device
from gpp.runtime.worker.rows import Order, Rows, minibatch_indices
from gpp.runtime.worker.search import Search
from gpp.runtime.worker.seat import Portion, Seat, pass_seed
from gpp.runtime.worker.stage import StageRunner
from gpp.weights.base import AbstractWeights
from gpp.weights.flush import Flush

EVALUATION_SENDS = 16
"""Sends under way in an evaluation, which nothing else bounds; more where the order of a device with several stages needs more."""


class Worker:
    """A device's share of a job.

    Args:
        rows: where the rows of its stages come from.
        state: weights, buffers and the optimizer's state to begin with, by the names of a checkpoint; None: the job's own.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        seat: Seat,
        *,
        rows: Callable[[Settings, torch.device, AbstractCard | None], Rows] = Rows,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        began = time.thread_time()
        self.job, self.run_dir, self.seat = job, run_dir, seat
        device_id, device, transport, self.status = seat.device_id, seat.device, seat.transport, seat.status
        self.device_id, self.card, self.memory = device_id, seat.card, MemoryEvents(transport.lend)
        plan, settings = job.plan, job.settings
        self.stages = plan.stages_of_device.get(device_id, ())
        self.teams = Teams(job, self.stages, device_id, transport, self.status)
        self.modules = build_modules(job, run_dir, self.stages, device, self.teams, state or {})
        self.params = {name: p for module in self.modules.values() for name, p in module.named_parameters()}
        params = {s: dict(module.named_parameters()) for s, module in self.modules.items()}
        self._own = OwnDevice.at(seat, job=job, modules=self.modules, params=params, handover={})
        self._hooks = build_hooks(self._own)
        self._params = params | {s: dict(others) for hooks in self._hooks for s, others in hooks.params_of_others().items()}
        self.spec = restore(settings.optimizer)
        policy: AbstractWeights = restore(settings.weights) if settings.weights else Flush()
        specs = {s: policy.optimizer_at(self.spec, plan.position(s)) for s in self.stages}
        elsewhere = {name for name, owner in owners_of(job).items() if owner != device_id}
        self.optimizers = build_optimizers(specs, self.modules, elsewhere)
        known = policy, plan, self.modules, self.optimizers, specs
        self.weights = part_of(policy).weights(*known, rate=self._rate, saved_at=self._saved_at)
        self.rows, self._even = rows(settings, device, seat.card), EvenOrder(job)
        overlaps = settings.backend == "nccl" and not job.streams
        self.gradients = self._gradients(reduce_groups(plan, job.graph), BUCKET_BYTES if overlaps else None)
        rank, world = plan.devices.index(device_id), plan.num_devices
        self.search = Search(run_dir / "ranks", settings, rank=rank, world=world, warn=lambda words: self._log({"warning": words}))
        self.training = self._training(overlaps=overlaps)
        if seat.card is None:
            transport.idle = self._idle
        self.search.runners = tuple(self.training.runners.values())
        self.evaluation = self._evaluation() if job.evaluation else None
        transport.prepare(all_ring_sizes(job, device_id, self.training, self.evaluation))
        self.checkpoints = build_checkpointer(self._own, run_dir, self.optimizers.values(), self.teams.split, self._hooks)
        # Stages of one device may end a mini-batch in different periods: the last of them ends it for the device.
        self._last = next((a.stage for a in reversed(job.program.actions[device_id]) if a.kind in UPDATES), None)
        self.checkpoints.restore(state)
        # Mini-batches that the pipeline takes to fill, and to drain; stages are so many steps apart at a time.
        self._ahead = fill(plan) if job.streams else 0
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS + self._ahead)
        self.step, self._since, self._start, self._stop, self._listens = settings.first_step, 0.0, 0, 0, False
        self._log: Callable[[dict[str, Any]], None] = lambda record: None
        self._lines: Lines | None = None
        self.built_s = time.thread_time() - began  # without what others are waited for

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the user."""
        return tuple(note for hooks in self._hooks for note in hooks.notes)

    def _gradients(self, groups: Sequence[ReduceGroup], bucket_bytes: int | None) -> Gradients:
        """The gradients of the device's parameters; arguments as `Gradients` has them."""
        params = {name: p for own in self._params.values() for name, p in own.items()}
        clip, counts = self.spec.clip_norm if self.spec.clips_model else None, self.teams.split.counts
        return Gradients(self._own, params, groups, clip_norm=clip, counts=counts, hooks=self._hooks, bucket_bytes=bucket_bytes)

    def _rate(self, update: int) -> float:
        """The learning rate of an update."""
        return self.spec.lr * self.spec.learning_rate.factor(update, self.job.settings.steps)

    def _runners(
        self, modules: Mapping[int, StageModule], mailboxes: Mapping[int, Mailbox], program: Program, *, train: bool
    ) -> dict[int, StageRunner]:
        plan = self.job.plan
        out: dict[int, StageRunner] = {}
        for s, module in modules.items():
            own, last = [p for p in module.parameters() if p.requires_grad], 4 * accumulation(plan, s)
            out[s] = StageRunner(
                module,
                seat=self._own,
                mailbox=mailboxes[s],
                portion=Portion.of(plan.stages[s], self.device_id, plan.minibatch_size if train else program.num_samples),
                # A stage without backward passes keeps nothing for them.
                train=train and any(KINDS[a.kind].frees and a.stage == s for a in program.actions[self.device_id]),
                weights=self.weights.get(s) if train else None,
                on_nonfinite=self.search.told(train=train, late=self.card is not None),
                # Of two steps, and more where the pipeline does not drain; none where sums are under way when a backward ends.
                probes=Probes(own, last=last) if train and not self.gradients.overlaps else None,
            )
        return out

    def _training(self, *, overlaps: bool) -> Interpreter[StageRunner]:
        job, actions = self.job, self.job.program.actions[self.device_id]
        mailboxes = build_mailboxes(self._own, self.modules, job.program, self._hooks)
        runners = self._runners(self.modules, mailboxes, job.program, train=True)
        for hooks in self._hooks:
            hooks.attach(runners)
        return Interpreter(
            actions,
            runners,
            {**mailboxes, **{s: mailbox for hooks in self._hooks for s, mailbox in hooks.mailboxes_of_others().items()}},
            self.seat,
            BesidePasses(
                sums=self.gradients,
                update=self._update,
                updated=self._updated if job.streams else None,
                arm=self.gradients.arm if overlaps else None,
                issued=self.rows.ahead if self.card else None,
                own={kind: run for hooks in self._hooks for kind, run in hooks.runs().items()},
            ),
            pending_limit=self._room(job.program, {d: most_sends(own, job.plan) for d, own in job.program.actions.items()}),
            slower=slower(job, self.device_id),
        )

    def _evaluation(self) -> Interpreter[StageRunner]:
        program = self.job.evaluation
        assert program is not None
        modules = {s: module.eval_module() for s, module in self.modules.items()}
        mailboxes = build_mailboxes(self._own, modules, program, self._hooks)
        sizes = [stage.microbatch_size for stage in self.job.plan.stages]
        # A large micro-batch waits for several small ones, all of which may be under way.
        most = EVALUATION_SENDS * -(-max(sizes) // min(sizes))
        return Interpreter(
            program.actions[self.device_id],
            self._runners(modules, mailboxes, program, train=False),
            mailboxes,
            self.seat,
            pending_limit=self._room(program, dict.fromkeys(program.actions, most)),
        )

    def _room(self, program: Program, limits: Limits) -> int | None:
        """This device's limit of sends, large enough for the program to run to its end; None for no limit."""
        return None if limits[self.device_id] is None else enough_sends(program.waits, limits)[self.device_id]

    def _update(self, stage: int, minibatch: int) -> None:
        optimizer = self.optimizers.get(stage)
        self.gradients.settle()
        if optimizer is not None and not self.gradients.omits:
            rate = (self.weights[stage].rate if stage in self.weights else self._rate)(self.step + minibatch)
            set_rate(optimizer, rate)
            if self.spec.clip_norm is not None and not self.spec.clips_model:
                torch.nn.utils.clip_grad_norm_(
                    [p for group in optimizer.param_groups for p in group["params"]], self.spec.clip_norm
                )
            if stage in self.weights:
                self.weights[stage].update()
            else:
                self._renew(stage)  # no pass is under way: an update has the room of the copies for itself
                optimizer.step()
        self._renew(stage)
        if self.job.plan.periodic:
            self.gradients.clear(self._params[stage])
        elif stage == self.stages[-1]:
            for hooks in self._hooks:
                hooks.after_updates()
            self.gradients.clear()

    def _renew(self, stage: int) -> None:
        """Let go of narrow copies of a stage's weights, which other stages may share."""
        for module in self.modules.values():
            module.renew(self._params[stage].values())

    def train(self, first: int, count: int, log: Callable[[dict[str, Any]], None]) -> None:
        """Train for one stretch: so many optimizer steps from `first` on, drained at its end.

        Args:
            log: gets a record of each step: step, start and end (seconds), loss where it is known.
        """
        self.step, self._log, self._stop = first, log, first + count
        settings = self.job.settings

        def order(minibatch_of_stretch: int) -> torch.Tensor:
            step = first + minibatch_of_stretch
            indices = minibatch_indices(step, settings.minibatch_size, settings.train_samples, settings.seed)
            return self.rows.evened(indices, self._even) if self._even.amount else indices

        self._begin(self.training, "train", settings.minibatch_size, order, first)
        self._begin_weights(first)
        if self._listens and first == settings.first_step:
            self.memory.begin(held_by(self.modules.values(), self.optimizers.values(), self.weights.values()))
        self.status.begin(TRAINING, first)
        self._since = time.perf_counter()
        if self.job.streams:
            self.training.run(of_length(self.job.program, self.job.plan, self.device_id, count))
        else:
            self.training.run()
            self._record(0)
        for weights in self.weights.values():
            weights.settle()

    def _begin_weights(self, first: int) -> None:
        """Let the weight policies know where the stretch begins, and what of an interrupted one goes on with it."""
        known = self.checkpoints.in_flight(self.params) if first == self.job.settings.first_step and self.weights else None
        self._start, history = known or (first, {})
        for weights in self.weights.values():
            names = self._names(weights)
            own = {key: [found[name] for name in names] for key, found in history.items() if set(names) <= set(found)}
            weights.begin(first, self._start, own)

    def _names(self, weights: AbstractStageWeights) -> list[str]:
        name_of = {id(param): name for name, param in self.params.items()}
        return [name_of[id(master)] for master in weights.masters]

    def _saved_at(self, done: int) -> bool:
        """Whether a checkpoint is made after so many steps while micro-batches are in flight."""
        return self.checkpoints.due(done) and not self.job.settings.checkpoint_drain and done < self._stop

    def _checkpoint(self, done: int) -> None:
        """Save while the pipeline is full: also the weights that micro-batches in flight have used."""
        history: dict[str, dict[str, torch.Tensor]] = {}
        before: dict[str, torch.Tensor] = {}
        for weights in self.weights.values():
            for key, tensors in weights.history().items():
                history.setdefault(key, {}).update(zip(self._names(weights), tensors, strict=True))
            before |= weights.take_before()
        self.status.enter(CHECKPOINT)
        with self.memory.apart():  # who lets go of the weights before is heard
            self.checkpoints.save(done, self._start, history=history, before=before)
        self.status.enter(TRAINING)

    def _record(self, minibatch_of_stretch: int) -> None:
        """Log a step that is done; its events are kept, unless the pipeline drains meanwhile."""
        self._settle(self.training)
        step, end = self.step + minibatch_of_stretch, time.perf_counter()
        events, waited = self.training.take()
        if step < self._stop - self._ahead or step < self.job.settings.first_step + KEPT_STEPS:
            self.kept.append({"step": step, "start": self._since, "end": end, "waited_s": waited, "events": events})
        results: dict[str, Any] = self._results(self.training, minibatch_of_stretch) | self.gradients.told
        if told := {name: value for hooks in self._hooks for name, value in hooks.told().items()}:
            results["told"] = told
        if self.job.settings.replan_every:
            results["pass_s"] = sum(event.end_s - event.start_s for event in events if event.kind in COMPUTE)
        self._log({"step": step, "start": self._since, "end": end, **results})
        self._since = end
        if step > self.job.settings.first_step + self._ahead:  # the second step, which finds the optimizer's state
            self.memory.end()

    def _settle(self, interpreter: Interpreter[StageRunner]) -> None:
        """Wait until the device has done what was issued, and look at the losses."""
        self.seat.clock.settle()
        for runner in interpreter.runners.values():
            runner.examine()

    def _updated(self, stage: int, minibatch_of_stretch: int) -> None:
        if stage != self._last:
            return
        if self.card:
            self.rows.ahead()
        self._record(minibatch_of_stretch)
        if self._saved_at(self.step + minibatch_of_stretch + 1):
            self._checkpoint(self.step + minibatch_of_stretch + 1)

    def _begin(self, interpreter: Interpreter[StageRunner], split: str, size: int, order: Order, step: int) -> None:
        for s, runner in interpreter.runners.items():
            module, rows = runner.module, partial(self.rows.fetch, split, size, order)
            # What a loss of the mini-batch is divided by is of all its samples.
            alone = None if module.counts else tuple(sorted(runner.portion.pieces.values()))
            own = rows(module.inputs, alone)
            labels = rows(module.counts.reads) if module.counts and module.counts.reads != module.inputs else own
            runner.begin(module.counting(own, labels, size), partial(self._seed, s), step)

    def _seed(self, stage: int, microbatch: int) -> int:
        replicas = self.job.plan.stages[stage].replicas
        replica = next(r for r, devices in enumerate(replicas) if self.device_id in devices)
        minibatch, within = divmod(microbatch, accumulation(self.job.plan, stage))
        return pass_seed(self.job.settings.seed, self.step + minibatch, stage, within, replica)

    def _results(self, interpreter: Interpreter[StageRunner], minibatch_of_stretch: int) -> dict[str, float]:
        """The device's share of each result, over its stages; all members of a replica have the same ones."""
        out: dict[str, float] = {}
        for runner in self.teams.led(interpreter.runners):
            for name, value in runner.results.pop(minibatch_of_stretch, {}).items():
                out[name] = out.get(name, 0.0) + float(value)
        return out

    def evaluate(self) -> dict[str, float]:
        """Results on the held-out samples, this device's share of each mean."""
        assert self.evaluation is not None and self.job.evaluation is not None
        size = self.job.evaluation.num_samples
        with self.memory.apart():
            self.status.enter(STARTING)
            self._begin(self.evaluation, "test", size, lambda _: torch.arange(size), self._stop)
            self.status.begin(EVALUATION, self.step)
            with torch.no_grad():
                self.evaluation.run()
            self._settle(self.evaluation)
            return self._results(self.evaluation, 0)

    def listen(self, out: TextIO) -> Lines:
        """Take the place for the worker's lines, one JSON object each, before the first step."""
        actions = self.job.program.actions[self.device_id]
        waits = self.card is None and not self.job.streams and any(a.kind in RECEIVES for a in actions)
        lines = self._lines = Lines(out, holds=waits)
        self._listens = self.card is None
        gc.collect()
        if not self.job.settings.replan_every:  # what has been made so far stays: no collection needs to look at it again
            gc.freeze()
        for words in self.notes:
            lines.write({"warning": words})
        return lines

    def _idle(self) -> None:
        """Do what is due while a message is waited for."""
        self.rows.ahead()
        if self._lines:
            self._lines.flush()

    def finish(self) -> None:
        """Write what belongs to the end: the last steps' events, the most memory held, the final weights."""
        self.memory.end()
        self.status.enter(CHECKPOINT)
        self.checkpoints.wait()
        self.search.weights(self._stop - 1)
        peak_bytes = self.card.peak_memory_bytes() if self.card else self.memory.peak_bytes
        write_device(self.run_dir, self.device_id, peak_bytes, self.kept, self.weights)
        self.teams.save(self.run_dir, self.modules)
