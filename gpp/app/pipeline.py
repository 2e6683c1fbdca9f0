"""`gpp.parallelize`: a model on several devices, trained in one's own loop.

pipeline = gpp.parallelize(model, x, y, loss=nn.functional.mse_loss, devices=2)
for x, y in loader:
    loss = pipeline.step(x, y)
pipeline.close()

One process starts the workers; or, under a launcher (torchrun), every rank runs the program and is one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from gpp.app.batches import check_ignored, examples_size, named_targets, rows_of, same_constants
from gpp.app.changes import UserObjects
from gpp.app.forms import Forms
from gpp.app.optimizer_factory import optimizer_of
from gpp.app.wanted import Launch, Wanted, plain_module
from gpp.cluster import Cluster, local
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.problem import Problem
from gpp.data.base import TARGET
from gpp.errors import GppError, InvalidConfig
from gpp.files import write_text
from gpp.graph.captured import LOSS, with_total
from gpp.plan.loss_stage import LossScope
from gpp.plan.plan import Plan
from gpp.report.run.page import run_report
from gpp.report.run.record import Asked, Planned, RunRecord
from gpp.report.run.result import write_json
from gpp.report.run.terminal import show_plan
from gpp.runtime.checkpoint.final import finish_final
from gpp.runtime.controller.collected import collect
from gpp.runtime.controller.controller import Follower, clear
from gpp.runtime.controller.place import LaunchPlace, world_of
from gpp.runtime.engine import Progress
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import Job
from gpp.runtime.run_dir import RunDir
from gpp.strategy import Strategy
from gpp.timeline import Outcome

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpp.app.batches import Count, Inputs, Targets
    from gpp.app.optimizer_factory import GivenOptimizer
    from gpp.export.base import AbstractExporter
    from gpp.runtime.live.crew import Crew
    from gpp.runtime.live.ranks import Meeting, Ranks

    Workers: TypeAlias = Crew | Ranks


def parallelize(
    model: nn.Module,
    example_inputs: Inputs,
    example_targets: Targets = None,
    *,
    loss: Callable[..., Tensor | Mapping[str, Tensor]] | None = None,
    devices: int | Cluster | None = None,
    optimizer: GivenOptimizer = None,
    strategy: Strategy | None = None,
    plan: Plan | None = None,
    microbatch_size: int | None = None,
    loss_scope: LossScope = "microbatch",
    items: Count | Mapping[str, Count] | None = None,
    metrics: Mapping[str, Callable[..., Tensor]] | None = None,
    cost: AbstractCostModel | None = None,
    steps: int | None = None,
    lengths: int = 16,
    seed: int = 0,
    run_dir: str | Path = "outputs/pipeline",
    engine: Distributed | None = None,
    launch: Launch | None = None,
    progress: Progress | None = None,
) -> Pipeline:
    """Capture a model, plan, and start a worker for each device; the model itself stays where it is, and holds the trained weights
    when the pipeline is closed.

    Under a launcher every rank calls this and all methods of what it returns, with the same batches, and is the worker of one
    device in its own process. Rank 0 captures and plans, and all begin with its weights.

    Args:
        example_inputs: a mini-batch as the model takes it, batch first: one tensor [samples, ...], several by position, or by
            name; or dataclasses, dicts and lists of them. Booleans, numbers, words and None are constants of the capture. No batch
            may have more samples; others may have fewer, and other lengths.
        example_targets: a mini-batch of what the loss compares with; None where the inputs have it.
        loss: (outputs, targets) -> mean over samples or over items (tokens, the labels that count); without targets it gets the
            outputs alone. None takes the `loss` of the model's own outputs, as models of Hugging Face have it. Parameters of a loss
            that is a module are trained, too.
        devices: so many cores of this machine, or a cluster; None for two, and under a launcher for one each rank.
        optimizer: settings of one (`gpp.Adam`); or one of torch's over the model's parameters, or a function (params) -> one, whose
            class and settings every worker makes its own of (`gpp.app.optimizer_factory`); Adam(lr=1e-3) if None.
        strategy: graphpipe with 1F1B if None; it must drain after every mini-batch, since the next one is not known.
        plan: one that was made before, in place of the strategy's.
        microbatch_size: samples of a micro-batch; None leaves it to the planner.
        loss_scope: `minibatch` computes the loss on the whole mini-batch at once: for one that is no mean over samples, such as a
            contrastive one.
        items: (inputs, targets) -> the number that the loss is a mean over, by term where the loss has several; only for a loss of
            which it is not found by itself. Without targets it gets the inputs alone; of one input or target it gets the tensor.
        metrics: what `evaluate` tells beside the loss: name -> function like `loss`.
        cost: what operators take; measured on this machine if None.
        steps: all steps of the training, for a learning rate that follows them.
        lengths: at how many lengths (sizes behind the samples) the model may be captured, those of the examples included; a new one
            takes as long as the first capture, once. 1 refuses others.
        seed: of dropout and the like.
        run_dir: gets the job, the ranks' logs, the final weights and the report.
        engine: settings of the workers.
        launch: `local` starts workers on this machine, `ranks` makes this process one of them. None: `ranks` where RANK and a
            WORLD_SIZE above 1 are set, as torchrun does; under Slurm's srun say `ranks`.
        progress: gets warnings and instructions; they are printed if None.

    Raises:
        InvalidConfig: names what cannot be, the rule and the fix.
        CaptureError: the model cannot be captured; names the line.
        Infeasible: no plan fits.
        WorkerFailed: a worker could not start; under a launcher also where rank 0 has failed.
    """
    from gpp.capture.given import given as taken_apart
    from gpp.models.losses import module_of

    progress = progress or Progress()
    model = plain_module(model, progress.warn)
    examples, targets = taken_apart(model, example_inputs), named_targets(example_targets)
    inputs = examples.tensors
    engine = engine or Distributed()
    place = _place(engine, launch)
    count = devices if devices is not None else place.world if place else 2
    given: dict[str, Any] = {"strategy": strategy, "cost": cost}
    chosen, made = optimizer_of(optimizer, model, module_of(loss))
    wanted = Wanted(
        model=model,
        examples=examples,
        size=examples_size({**inputs, **targets}),
        cluster=count if isinstance(count, Cluster) else local(num_devices=count),
        optimizer=chosen,
        made=made,
        loss=loss,
        items=items,
        metrics=metrics,
        plan=plan,
        microbatch_size=microbatch_size,
        loss_scope=loss_scope,
        steps=steps,
        lengths=lengths,
        seed=seed,
        run_dir=str(run_dir),
        engine=engine,
        place=place,
        progress=progress,
        **{name: value for name, value in given.items() if value is not None},
    )
    if place is not None:
        return _joined(wanted, place, inputs, targets)
    problem, job = _planned(wanted, inputs, targets)
    return Pipeline(wanted, problem, job)


def _place(engine: Distributed, launch: Launch | None) -> LaunchPlace | None:
    """This process's place among the ranks of a launch; None where it is the only one, and starts workers."""
    launched = "RANK" in os.environ and (world_of(os.environ) or 1) > 1
    if launch == "local" or (launch is None and engine.launch != "env" and not launched):
        return None
    return LaunchPlace.of(os.environ, interface=engine.interface, address=engine.master_addr, port=engine.master_port)


def _planned(wanted: Wanted, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> tuple[Problem, Job]:
    """The problem and the job; the user is told what there is to know."""
    captured = wanted.capture(inputs, targets)
    problem = wanted.problem(captured)
    plan = wanted.planned(problem)
    job = wanted.job(captured, problem, plan)
    rows = {**inputs, **{TARGET + name: tensor for name, tensor in targets.items()}}
    for words in wanted.warnings(captured, job.plan, rows):
        wanted.progress.warn(words)
    return problem, job


def _joined(wanted: Wanted, place: LaunchPlace, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Pipeline:
    """The pipeline of one rank among several."""
    from gpp.runtime.live.ranks import Meeting

    engine = wanted.engine
    meeting = Meeting(place, interface=engine.interface, limit_s=engine.startup_timeout_s)
    if place.rank:
        path, hold = meeting.take()
        job = Job.load(path)
        problem = Problem(graph=job.graph, cluster=job.cluster, cost=Analytical(), minibatch_size=job.plan.minibatch_size)
        return Pipeline(replace(wanted, run_dir=str(path)), problem, job, meeting, hold)
    try:
        problem, job = _planned(wanted, inputs, targets)
        return Pipeline(wanted, problem, job, meeting)
    except BaseException as error:
        meeting.fail(error)
        raise


@final
class Pipeline:
    """A model whose stages are on workers; `parallelize` makes it. As a context manager it is closed at the end.

    Under a launcher all ranks call its methods alike, and get the same results.

    Args:
        wanted: what the user asked for.
        problem: of the examples; beside rank 0 without measured costs.
        job: of the examples.
        meeting: of the ranks; None where this process starts the workers.
        hold: of a rank, on a run directory that its machine has for itself.
    """

    def __init__(
        self, wanted: Wanted, problem: Problem, job: Job, meeting: Meeting | None = None, hold: RunDir | None = None
    ) -> None:
        from gpp.capture.coupling import ignored_label
        from gpp.models.losses import module_of

        self.model, self.strategy, self.run_dir, self.plan = wanted.model, wanted.strategy, Path(wanted.run_dir), job.plan
        self.problem = problem
        self._criterion = module_of(wanted.loss)
        self.losses: list[float] = []
        self._wanted, self._job, self._outcome = wanted, job, Outcome()
        self._forms = Forms(job, problem, wanted.strategy, wanted.of_rows, most=wanted.lengths)
        self._usual: set[int] = set()
        self._given = UserObjects(wanted.model, wanted.loss, wanted.made, wanted.progress.warn)
        self._ignored = ignored_label(job.captured)
        self._first = meeting is None or meeting.place.rank == 0
        self._directory = hold or (RunDir(self.run_dir, field="run_dir") if self._first else None)
        self._workers: Workers | None = None
        try:
            self._workers = self._start(job, meeting, lacks=hold is not None)
        except BaseException:
            self._release()
            raise
        for words in self._workers.notes if self._first else ():
            wanted.progress.warn(words)

    def _start(self, job: Job, meeting: Meeting | None, *, lacks: bool) -> Workers:
        from gpp.capture.stage import initial_state

        if self._first and self._directory:
            self._directory.claim()
            self._directory.begin()
            job.save(self.run_dir, initial_state(self.model, job.captured, self._criterion))
        if meeting is None:
            from gpp.runtime.live.crew import Crew

            return Crew(job, self.run_dir)
        from gpp.runtime.live.ranks import Ranks

        if self._first:
            clear(self.run_dir)
            meeting.give(self.run_dir)
        return Ranks(meeting, job, self.run_dir, lacks=lacks)

    def step(self, inputs: Inputs, targets: Targets = None) -> float:
        """Train on a mini-batch: forwards, backwards, update. The mean loss over its samples, before the update.

        Args:
            inputs, targets: as the examples were given; of at most as many samples, and of any lengths (`lengths`).

        Raises:
            InvalidConfig: the batch is not as the examples are, or the ranks were given different ones; nothing was trained.
            WorkerFailed: a worker died.
        """
        found = with_total(self._ask("step", inputs, targets))
        self.losses.append(found[LOSS])
        return found[LOSS]

    def evaluate(self, inputs: Inputs, targets: Targets = None) -> dict[str, float]:
        """Loss and metrics of a mini-batch, in evaluation mode; nothing is trained. Arguments and errors as of `step`."""
        return with_total(self._ask("evaluate", inputs, targets))

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers as they are now, by the names of the model, and those of a loss as `loss.NAME`; on every rank."""
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
        copy_into(self.model, self.state_dict(), self._criterion)
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
        )

    def __str__(self) -> str:
        """The plan as a table, with the modules, the predicted seconds and the memory of every stage."""
        from rich.console import Console

        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as shown:
            show_plan(console, self._record())
        return "\n".join(line.rstrip() for line in shown.get().strip("\n").splitlines())

    def close(self) -> None:
        """End the workers; model and loss get the trained weights, on every rank, and the run directory its report."""
        from gpp.runtime.checkpoint.state import copy_into

        if self._workers is None:
            return
        workers = self._workers
        try:
            if self.losses:
                copy_into(self.model, self.state_dict(), self._criterion)
            self._workers = None
            workers.end()
            if self._first:
                finish_final(self._job, self.run_dir)
            if self._usual and self._first:
                logs = Follower(self.run_dir / "ranks", self.plan.num_devices, self.plan.minibatch_size, Progress())
                logs.poll()
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
            same_constants(self._wanted.examples.constants, batch.constants)
            rows = rows_of(self._job, batch.tensors, named_targets(targets))
            workers.agree(rows)
            form = self._forms.number(rows)
            if form is None:
                form = self._forms.keep(rows, workers.add(lambda: self._made(rows)))
                self._given.renew()
            check_ignored(self._forms.jobs[form], rows, self._ignored)
            if what == "step":
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
            self._usual.add(len(self.losses))
        return found

    def _made(self, rows: Mapping[str, Tensor]) -> tuple[Job, dict[str, Tensor]]:
        """The job of a new form, and the values of constants that its capture lacks."""
        from gpp.capture.stage import initial_state

        job = self._forms.make(rows)
        state = initial_state(self.model, job.captured, self._criterion)
        names = [job.captured.node_of[name].target for name, data in job.captured.constants.items() if data is None]
        return job, {name: state[name] for name in names}
