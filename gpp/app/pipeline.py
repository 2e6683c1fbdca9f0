"""What `gpp.parallelize` returns: a model whose stages are on workers, and which trains when it is told to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from gpp.app.batches import check_ignored, named_targets, rows_of
from gpp.app.changes import UserObjects
from gpp.app.forms import Forms
from gpp.app.uneven import evened_rows
from gpp.app.wanted import Wanted
from gpp.app.words import INSTEAD, StepLoss
from gpp.cost.problem import Problem
from gpp.data.base import TARGET
from gpp.errors import GppError, InvalidConfig
from gpp.files import write_text
from gpp.graph.captured import LOSS, with_total
from gpp.report.run.page import run_report
from gpp.report.run.record import Asked, Planned, PlanWorth, RunRecord
from gpp.report.run.result import write_json
from gpp.report.run.terminal import show_plan
from gpp.runtime.checkpoint.final import finish_final
from gpp.runtime.controller.collected import collect
from gpp.runtime.controller.controller import Follower
from gpp.runtime.engine import OnStep, Progress
from gpp.runtime.job import Job
from gpp.runtime.run_dir import RunDir
from gpp.timeline import Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from gpp.app.batches import Inputs, Targets
    from gpp.capture.given import ModelInputs
    from gpp.export.base import AbstractExporter
    from gpp.planners.bounds.lower_bound import Bound
    from gpp.runtime.controller.attendant import Attendant
    from gpp.runtime.controller.leader import Leader
    from gpp.runtime.live.crew import Crew
    from gpp.runtime.live.ranks import Ranks

    Workers: TypeAlias = Crew | Ranks


@final
class Pipeline:
    """A model whose stages are on workers; `parallelize` makes it. As a context manager it is closed at the end.

    Under a launcher all ranks call its methods alike, and get the same results.

    Args:
        wanted: what the user asked for.
        problem: of the examples; beside rank 0 without measured costs.
        job: of the examples.
        meeting: this process among the ranks; None where it starts the workers.
        hold: of a rank, on a run directory that its machine has for itself.
    """

    def __init__(
        self, wanted: Wanted, problem: Problem, job: Job, meeting: Leader | Attendant | None = None, hold: RunDir | None = None
    ) -> None:
        from gpp.capture.coupling import ignored_label
        from gpp.models.losses import module_of

        self.model, self.strategy, self.run_dir, self.plan = wanted.model, wanted.strategy, Path(wanted.run.folder), job.plan
        self.problem = problem
        self._criterion = module_of(wanted.loss.function)
        self.losses: list[float] = []
        self._wanted, self._job, self._outcome = wanted, job, Outcome()
        self._forms = Forms(job, problem, wanted.strategy, wanted.examples, wanted.of_rows, most=wanted.planning.lengths)
        self._usual: set[int] = set()
        self._given = UserObjects(wanted.model, wanted.loss.function, wanted.made, wanted.run.progress.warn)
        self._ignored = ignored_label(job.captured)
        self._first = meeting is None or meeting.place.rank == 0
        self._directory = hold or (RunDir(self.run_dir, field="run.folder") if self._first else None)
        self._workers: Workers | None = None
        try:
            self._workers = self._start(job, meeting)
        except BaseException:
            self._release()
            raise
        for words in self._workers.notes if self._first else ():
            wanted.run.progress.warn(words)

    def _start(self, job: Job, meeting: Leader | Attendant | None) -> Workers:
        from gpp.capture.stage import initial_state

        if self._first and self._directory:
            self._directory.claim(Path(found) if (found := job.settings.resume) else None, job.settings.first_step)
            self._directory.begin()
            job.save(self.run_dir, initial_state(self.model, job.captured, self._criterion))
        if meeting is None:
            from gpp.runtime.live.crew import Crew

            return Crew(job, self.run_dir)
        from gpp.runtime.controller.leader import Leader
        from gpp.runtime.live.ranks import Ranks

        if isinstance(meeting, Leader):
            meeting.give(job, self.run_dir, self._wanted.run.progress)
        return Ranks(meeting, job, self.run_dir)

    @property
    def done(self) -> int:
        """Steps of the training so far, those before a checkpoint that it went on from included."""
        return self._job.settings.first_step + len(self.losses)

    def step(self, inputs: Inputs, targets: Targets = None) -> StepLoss:
        """Train on a mini-batch: forwards, backwards, update. The mean loss over its samples, before the update.

        Args:
            inputs, targets: as the examples were given; of at most as many samples, and of any lengths (`lengths`).

        Raises:
            InvalidConfig: the batch is not as the examples are, or the ranks were given different ones; nothing was trained.
            WorkerFailed: a worker died.
        """
        found = with_total(self._ask("step", inputs, targets))
        self.losses.append(found[LOSS])
        self._wanted.run.progress.on_step(self.done, found[LOSS], None)
        return StepLoss(found[LOSS])

    def train(
        self,
        loader: Iterable[Any],
        steps: int | None = None,
        *,
        scheduler: Any = None,
        on_step: OnStep | None = None,
        held_out: Sequence[Any] | None = None,
        evaluate_every: int = 0,
    ) -> list[float]:
        """Train on a loader's batches, again and again until there were enough; the losses of the steps that were done.

        A pipeline that goes on from a checkpoint passes over the batches that the training had before, and sets the scheduler to
        where it was, so a loader that has the same batches each time gives the training that was not interrupted.

        Args:
            loader: of (inputs, targets), or of inputs where the examples had no targets.
            steps: all steps of the training, counted from its very first one; None: once through the loader.
            scheduler: of torch's, over the optimizer that `gpp.parallelize` was given; it takes a step after each step.
            on_step: called after each step: (steps done, loss, samples per second).
            held_out: a mini-batch as the loader has them, to evaluate on; the results go to `on_evaluation` of the progress.
            evaluate_every: steps between two evaluations, of which the last has one, too; 0 for the last alone.

        Raises:
            InvalidConfig: `steps` are done already, or the loader is empty or ends before; a batch is not as the examples are.
            WorkerFailed: a worker died.
        """
        from gpp.app.training import batches_of, samples_of, set_scheduler
        from gpp.report.run.console import StepProgress, make_console

        if steps is None:
            if not hasattr(loader, "__len__"):
                rule = "must be said for a loader without a length"
                raise InvalidConfig("steps", None, rule, "say pipeline.train(loader, steps=100)")
            steps = self.done + len(loader)  # type: ignore[arg-type]
        if steps <= self.done:
            rule = f"counts all steps of the training, of which {self.done} are done"
            raise InvalidConfig("steps", steps, rule, f"say steps={self.done + 100}")
        set_scheduler(scheduler, self.done)
        first = len(self.losses)
        batches = batches_of(loader, self.done if not first else 0)
        with StepProgress(make_console(quiet=not self._first), total=steps) as bar:
            while self.done < steps:
                inputs, targets = self._pair(next(batches))
                began = time.perf_counter()
                loss = float(self.step(inputs, targets))
                rate = samples_of(inputs) / (time.perf_counter() - began)
                if scheduler is not None:
                    scheduler.step()
                bar.update(self.done, loss, rate)
                if on_step is not None:
                    on_step(self.done, loss, rate)
                if held_out is not None and (self.done == steps or (evaluate_every and self.done % evaluate_every == 0)):
                    found = self.evaluate(*self._pair(held_out))
                    self._wanted.run.progress.on_evaluation({"step": self.done, **found})
        return self.losses[first:]

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch of a loader."""
        if not any(name.startswith(TARGET) for name in self._job.captured.rows):
            return batch, None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            rule = "must be (inputs, targets), as the examples were"
            raise InvalidConfig("batch", type(batch).__name__, rule, "yield pairs; several inputs are a tuple, or a dict by name")
        return batch[0], batch[1]

    def evaluate(self, inputs: Inputs, targets: Targets = None) -> dict[str, float]:
        """Loss and metrics of a mini-batch, in evaluation mode; nothing is trained. Arguments and errors as of `step`."""
        found = with_total(self._ask("evaluate", inputs, targets))
        return {name.removeprefix("metric:"): value for name, value in found.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict with the weights and buffers as they are now, those of a loss as `loss.NAME`; on every rank."""
        from gpp.runtime.checkpoint.state import whole_state

        return whole_state(self.model, self._weights(), self._criterion)

    def _weights(self) -> dict[str, Tensor]:
        """What the workers have, by name; a tied weight by one of its names."""
        return self._open().ask("weights")[1]

    def save_pretrained(self, folder: str | Path, **settings: Any) -> None:
        """Copy the weights into the model, and let it save itself: for models of Hugging Face. Rank 0 writes.

        Raises:
            InvalidConfig: the model has no `save_pretrained`.
        """
        from gpp.runtime.checkpoint.state import copy_into

        if not hasattr(self.model, "save_pretrained"):
            fix = "save pipeline.state_dict(), as by safetensors.torch.save_file"
            raise InvalidConfig("model", type(self.model).__name__, "has no save_pretrained", fix)
        copy_into(self.model, self._weights(), self._criterion)
        self._given.renew()
        if self._first:
            self.model.save_pretrained(folder, **settings)
        self._open().barrier()

    def export(self, exporter: AbstractExporter, folder: str | Path) -> Path:
        """Write the plan for another engine (`gpp.export`), as `gpp.app.exporting.of_pipeline` says. The path of its PLAN.md."""
        from gpp.app.exporting import of_pipeline

        return of_pipeline(self._job, self.problem, self.strategy, exporter, Path(folder))

    def report(self) -> Path:
        """Write result.json and report.html; after `close` they have the measured times. The path of the report. Rank 0 writes."""
        if self._first:
            record = self._record()
            write_json(self.run_dir / "result.json", record.result)
            write_text(self.run_dir / "report.html", run_report(record))
        return self.run_dir / "report.html"

    def _record(self) -> RunRecord:
        from gpp.app.judging import unbounded

        cluster, seed = self.problem.cluster, self._job.settings.seed
        names = {"model": type(self.model).__name__, "cluster": cluster.name, "engine": "distributed"}
        return RunRecord(
            asked=Asked.of(self.strategy, self.problem.cost, **names, seed=seed),
            planned=Planned(
                plan=self.plan,
                graph=self._job.graph,
                cluster=cluster,
                predicted=self.strategy.predict(self.plan, self.problem),
                checked=self._job.captured.checked,
            ),
            outcome=Outcome(measured=self._outcome.measured, losses=tuple(self.losses)),
            judged=PlanWorth(bound=self._bound, unbounded=unbounded(self.strategy, self.problem)),
        )

    @cached_property
    def _bound(self) -> Bound | None:
        from gpp.app.judging import bound_under

        return bound_under(self.strategy, self.problem) if self._first else None  # other ranks do not know what operators take

    def __str__(self) -> str:
        """The plan as a table, with the modules, the predicted seconds and the memory of every stage."""
        from rich.console import Console

        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as shown:
            show_plan(console, self._record())
        return "\n".join(line.rstrip() for line in shown.get().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        """The report, in a frame of a notebook; after `close` with the measured times."""
        from html import escape

        frame = 'width="100%" height="720" style="border:1px solid #8888"'
        return f'<iframe srcdoc="{escape(run_report(self._record()))}" {frame}></iframe>'

    def close(self) -> None:
        """End the workers; model and loss get the trained weights, on every rank, and the run directory its report."""
        from gpp.runtime.checkpoint.state import copy_into

        if self._workers is None:
            return
        workers = self._workers
        try:
            if self.done:
                copy_into(self.model, self._weights(), self._criterion)
            self._workers = None
            workers.end()
            if self._first:
                finish_final(self._job, self.run_dir)
            if self._usual and self._first:
                first = self._job.settings.first_step
                logs = Follower(self.run_dir / "ranks", self.plan.num_devices, self.plan.minibatch_size, Progress(), first)
                logs.poll()
                if logs.ends:  # else the folder was deleted, and its times with it
                    self._outcome = collect(self._job, self.run_dir, logs, counted=self._usual)
            self.report()
        finally:
            self._workers = None
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif self._workers is not None:
            self._workers.close(error)
            self._workers = None
            self._release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A pipeline is no module.

        Raises:
            InvalidConfig: always; says what to call.
        """
        raise InvalidConfig("pipeline", "called", INSTEAD["forward"], "call pipeline.step(inputs, targets)")

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"a pipeline has no {name}: {INSTEAD[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _release(self) -> None:
        if self._directory is not None:
            self._directory.release()

    def _open(self) -> Workers:
        if self._workers is None:
            raise InvalidConfig("pipeline", "closed", "its workers have ended", "call gpp.parallelize again")
        return self._workers

    def _ask(self, what: Any, inputs: Inputs, targets: Targets) -> dict[str, float]:
        from gpp.capture.given import given

        workers = self._open()
        try:
            batch = given(self.model, inputs)
            rows = rows_of(self._job, batch.tensors, named_targets(targets))
            workers.agree(rows, batch.constants)
            form = self._forms.number(rows, batch)
            if form is None:
                form = self._forms.keep(rows, batch, workers.add(lambda: self._made(rows, batch)))
                self._given.renew()
            check_ignored(self._forms.jobs[form], rows, self._ignored)
            if what == "step":
                rows = evened_rows(self._forms.jobs[form], rows)
                self._given.look()
                if (values := self._given.settings()) is not None:
                    workers.follow(values)
            found = workers.ask(what, rows, form)[0]
        except InvalidConfig:
            raise
        except GppError:
            self._workers = None
            self._release()
            raise
        if what == "step" and form == 0:
            self._usual.add(self.done)
        return found

    def _made(self, rows: Mapping[str, Tensor], batch: ModelInputs) -> tuple[Job, dict[str, Tensor]]:
        """The job of a new form, and the values of constants that its capture lacks."""
        from gpp.capture.stage import initial_state

        job = self._forms.make(rows, batch)
        state = initial_state(self.model, job.captured, self._criterion)
        names = [job.captured.node_of[name].target for name, data in job.captured.constants.items() if data is None]
        return job, {name: state[name] for name in names}
