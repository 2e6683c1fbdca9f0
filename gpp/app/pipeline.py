"""`gpp.parallelize`: a model on several devices, trained in one's own loop.

pipeline = gpp.parallelize(model, x, y, loss=nn.functional.mse_loss, devices=2)
for x, y in loader:
    loss = pipeline.step(x, y)
pipeline.close()
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

from gpp.app import api
from gpp.app.moving import check_unreplanned
from gpp.cluster import Cluster, local
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.data import tensors
from gpp.data.base import TARGET
from gpp.errors import GppError, InvalidConfig
from gpp.graph.captured import LOSS, with_total
from gpp.graph.series_parallel import branches
from gpp.optimizers import AbstractOptimizer, Adam
from gpp.plan.loss_stage import LossScope
from gpp.plan.plan import Plan
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.report.run.page import run_report
from gpp.report.run.record import RunRecord
from gpp.report.run.result import result_dict, write_json, write_text
from gpp.runtime.controller.controller import Follower, collect
from gpp.runtime.devices import check_devices
from gpp.runtime.engine import Outcome, Progress
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import assemble
from gpp.runtime.run_dir import RunDir
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpp.runtime.live.crew import Crew

    Inputs: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
    Targets: TypeAlias = Tensor | Mapping[str, Tensor] | None

FIX_IGNORED = 'give the labels as targets and say loss=..., with loss_scope="minibatch"'

ENDLESS = 1_000_000_000
"""Steps of a training whose end is not said."""


def parallelize(
    model: nn.Module,
    example_inputs: Inputs,
    example_targets: Targets = None,
    *,
    loss: Callable[..., Tensor | Mapping[str, Tensor]] | None = None,
    devices: int | Cluster = 2,
    optimizer: AbstractOptimizer | None = None,
    strategy: Strategy | None = None,
    plan: Plan | None = None,
    microbatch_size: int | None = None,
    loss_scope: LossScope = "microbatch",
    metrics: Mapping[str, Callable[..., Tensor]] | None = None,
    cost: AbstractCostModel | None = None,
    steps: int | None = None,
    seed: int = 0,
    run_dir: str | Path = "outputs/pipeline",
    engine: Distributed | None = None,
) -> Pipeline:
    """Capture a model, plan, and start a worker for each device; the model itself stays where it is, and holds the trained weights
    when the pipeline is closed.

    Args:
        example_inputs: a mini-batch as the model takes it, batch first: one tensor, several by position, or by name.
        example_targets: a mini-batch of what the loss compares with; None where the inputs have it.
        loss: (outputs, targets) -> mean over samples; without targets it gets the outputs alone. None takes the `loss` of the
            model's own outputs, as models of Hugging Face have it.
        devices: so many cores of this machine, or a cluster.
        optimizer: Adam(lr=1e-3) if None.
        strategy: graphpipe with 1F1B if None; it must drain after every mini-batch, since the next one is not known.
        plan: one that was made before, in place of the strategy's.
        loss_scope: `minibatch` computes the loss on the whole mini-batch at once: for one that is no mean over samples, such as a
            contrastive one, or a mean over tokens of which some samples have more.
        metrics: what `evaluate` tells beside the loss: name -> function like `loss`.
        cost: what operators take; measured on this machine if None.
        steps: all steps of the training, for a learning rate that follows them.
        run_dir: gets the job, the ranks' logs, the final weights and the report.
        engine: settings of the workers.

    Raises:
        InvalidConfig: names what cannot be, the rule and the fix.
        CaptureError: the model cannot be captured; names the line.
        Infeasible: no plan fits.
        WorkerFailed: a worker could not start.
    """
    inputs, targets = _named(model, example_inputs), _targets(example_targets)
    size = _size({**inputs, **targets})
    optimizer, engine = optimizer or Adam(lr=1e-3), engine or Distributed()
    strategy = strategy or Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())
    check_unreplanned(strategy)
    if not strategy.schedule.drains:
        fix = "use a schedule that drains (OneFOneB, GPipe, ZeroBubbleH1), or gpp.train, which has all data"
        raise InvalidConfig("strategy", strategy.name, "does not drain, and a step ends before the next batch is known", fix)
    if optimizer.learning_rate.shape != "constant" and steps is None:
        raise InvalidConfig(
            "steps", None, f"learning rate {optimizer.learning_rate.shape} follows them", "say how many there will be"
        )
    cluster = local(num_devices=devices) if isinstance(devices, int) else devices
    check_devices(cluster, engine.devices_here(cluster), engine.name)
    captured = api.capture_model(model, inputs, targets, _loss_of(loss, bool(targets)), metrics)
    made = api.problem(
        captured,
        cluster,
        minibatch_size=size,
        optimizer=optimizer,
        microbatch_size=microbatch_size,
        cost=cost or Profiled(cache_dir=os.environ.get("GPP_CACHE", "~/.cache/gpp")),
        loss_scope=loss_scope,
    )
    if plan is None:
        plan = strategy.plan(made)
    else:
        strategy.check(plan, made)
    job = assemble(
        captured,
        made,
        plan,
        strategy,
        optimizer=optimizer,
        data=tensors.Tensors(folder=str(Path(run_dir, "data").resolve())),
        model=None,
        steps=steps or ENDLESS,
        dtype=api.float_type(model),
        seed=seed,
        train_samples=size,
        held_out=size,
        on_nonfinite="warn",
        overwrites=engine.overwrites,
        **engine.worker_settings,
    )
    engine.refuse(job)
    return Pipeline(model, made, strategy, job, Path(run_dir))


@final
class Pipeline:
    """A model whose stages are on workers of this machine; `parallelize` makes it.

    As a context manager it is closed at the end.
    """

    def __init__(self, model: nn.Module, problem: Problem, strategy: Strategy, job: Any, run_dir: Path) -> None:
        from gpp.capture.coupling import ignored_label
        from gpp.capture.stage import initial_state
        from gpp.runtime.live.crew import Crew

        self.model, self.problem, self.strategy, self.run_dir = model, problem, strategy, run_dir
        self.plan: Plan = job.plan
        self.predicted = strategy.predict(self.plan, problem)
        self.losses: list[float] = []
        self._job, self._outcome = job, Outcome()
        self._ignored = ignored_label(job.captured)
        self._directory = RunDir(run_dir, field="run_dir")
        self._directory.claim()
        self._crew: Crew | None = None
        try:
            self._directory.begin()
            job.save(run_dir, initial_state(model, job.captured))
            self._crew = Crew(job, run_dir)
        except BaseException:
            self._directory.release()
            raise

    def step(self, inputs: Inputs, targets: Targets = None) -> float:
        """Train on a mini-batch: forwards, backwards, update. The mean loss over its samples, before the update.

        Raises:
            InvalidConfig: the batch is not as the examples are.
            WorkerFailed: a worker died.
        """
        found = with_total(self._ask("step", self._batch(inputs, targets)))
        self.losses.append(found[LOSS])
        return found[LOSS]

    def evaluate(self, inputs: Inputs, targets: Targets = None) -> dict[str, float]:
        """Loss and metrics of a mini-batch, in evaluation mode; nothing is trained."""
        return with_total(self._ask("evaluate", self._batch(inputs, targets)))

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers as they are now, by the names of the model."""
        return self._workers().ask("weights")[1]

    def save_pretrained(self, folder: str | Path, **settings: Any) -> None:
        """Copy the weights into the model, and let it save itself: for models of Hugging Face."""
        from gpp.runtime.checkpoint.state import copy_into

        copy_into(self.model, self.state_dict())
        self.model.save_pretrained(folder, **settings)  # type: ignore[operator]

    def report(self) -> Path:
        """Write result.json and report.html; after `close` they have the measured times. The path of the report."""
        name, cluster = type(self.model).__name__, self.problem.cluster
        result = result_dict(
            status="ok",
            model=name,
            strategy=self.strategy.name,
            cluster=cluster.name,
            engine="distributed",
            seed=self._job.settings.seed,
            plan=self.plan,
            predicted=self.predicted.metrics,
            measured=self._outcome.measured.metrics if self._outcome.measured else None,
            loss=self.losses,
        )
        record = RunRecord(
            result=result,
            plan=self.plan,
            graph=self._job.graph,
            cluster=cluster,
            branches=branches(self._job.graph),
            predicted=self.predicted,
            measured=self._outcome.measured,
            losses=self.losses,
        )
        write_json(self.run_dir / "result.json", result)
        write_text(self.run_dir / "report.html", run_report(record))
        return self.run_dir / "report.html"

    def close(self) -> None:
        """End the workers; the model gets the trained weights, and the run directory its report."""
        from gpp.runtime.checkpoint.state import copy_into, load_final

        if self._crew is None:
            return
        crew, self._crew = self._crew, None
        try:
            crew.end()
            if self.losses:
                copy_into(self.model, load_final(self.run_dir))
                logs = Follower(self.run_dir / "ranks", self.plan.num_devices, self.plan.minibatch_size, Progress())
                logs.poll()
                self._outcome = collect(self._job, self.run_dir, logs)
            self.report()
        finally:
            self._directory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif self._crew is not None:
            self._crew.close()
            self._crew = None
            self._directory.release()

    def _workers(self) -> Crew:
        if self._crew is None:
            raise InvalidConfig("pipeline", "closed", "its workers have ended", "call gpp.parallelize again")
        return self._crew

    def _ask(self, what: str, batch: Mapping[str, Tensor]) -> dict[str, float]:
        try:
            return self._workers().ask(what, batch)[0]
        except GppError:
            if self._crew is not None:
                self._crew = None
                self._directory.release()
            raise

    def _batch(self, inputs: Inputs, targets: Targets) -> dict[str, Tensor]:
        """The rows of a mini-batch by the names that workers know.

        Raises:
            InvalidConfig: a tensor is missing, or not of the examples' form.
        """
        given = {**_named(self.model, inputs), **_targets(targets)}
        known = {node.target: node for node in self._job.captured.nodes if node.kind == "input"}
        rows = {TARGET + name if name not in known else name: tensor for name, tensor in given.items()}
        for name, node in known.items():
            if name not in rows:
                raise InvalidConfig("batch", sorted(given), f"lacks {name.removeprefix(TARGET)!r}", "give what the examples have")
            size = self.plan.minibatch_size
            form = [size if extent == "b" else extent for extent in node.shape or ()]
            if list(rows[name].shape) != form:
                rule = f"{name.removeprefix(TARGET)!r} must be of shape {form}, as in the examples"
                fix = "drop the last batch of a loader that does not divide (drop_last=True), or call gpp.parallelize for this size"
                raise InvalidConfig("batch", list(rows[name].shape), rule, fix)
        self._check_ignored(rows)
        return {name: rows[name] for name in known}

    def _check_ignored(self, rows: Mapping[str, Tensor]) -> None:
        """Refuse labels with which the mean over tokens is not the mean over micro-batches: some ignore more of them.

        Raises:
            InvalidConfig: names the tensor.
        """
        plan, graph = self.plan, self._job.graph
        sizes = {stage.microbatch_size for s, stage in enumerate(plan.stages) if plan.runs_backward(s, graph)}
        if self.problem.minibatch_ops or sizes == {plan.minibatch_size} or self._ignored is None:
            return
        for name, tensor in rows.items():
            if not tensor.is_floating_point() and (ignored := tensor == self._ignored).any():
                counts = {int(part.sum()) for part in ignored.split(min(sizes))}
                if len(counts) > 1:
                    rule = (
                        f"micro-batches of {min(sizes)} samples have {min(counts)} to {max(counts)} labels that the loss ignores, "
                    )
                    rule += "so that the mean over labels is not the mean over micro-batches"
                    raise InvalidConfig(name.removeprefix(TARGET), self._ignored, rule, FIX_IGNORED)


def _named(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Inputs by the names of the model's forward."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    from torch import Tensor

    values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    names = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(values) > len(names):
        raise InvalidConfig("inputs", len(values), f"{type(model).__name__}.forward takes {len(names)}", "give them by name")
    return dict(zip(names, values, strict=False))


def _targets(targets: Targets) -> dict[str, Tensor]:
    return {} if targets is None else api.named_targets(targets)


def _size(batch: Mapping[str, Tensor]) -> int:
    sizes = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(sizes.values())) != 1:
        raise InvalidConfig("example_inputs", sizes, "must all have as many samples", "give one mini-batch, batch first")
    return next(iter(sizes.values()))


def _loss_of(loss: Callable[..., Any] | None, compares: bool) -> Callable[..., Any]:
    """The loss as capture asks for it, (outputs, targets) -> loss."""
    if loss is not None:
        return loss if compares else lambda outputs, targets: loss(outputs)

    def own(outputs: Any, targets: Any) -> Any:
        found = outputs.get(LOSS) if isinstance(outputs, Mapping) else getattr(outputs, LOSS, None)
        if found is None:
            fix = "say loss=..., or give the model the labels that it makes its loss of"
            raise InvalidConfig("loss", None, "the model's outputs have none", fix)
        return found

    return own
