"""The platform from Python, without Hydra: capture, problem, plan, train.

captured = gpp.capture_model(model, {"x": x[:4]}, y[:4], loss)
cost = gpp.Profiled(cache_dir="~/.cache/gpp")
problem = gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=64, optimizer=gpp.Adam(lr=1e-3), cost=cost)
strategy = gpp.Strategy(name="graphpipe", planner=gpp.GraphPipe(), schedule=gpp.OneFOneB())
plan = strategy.plan(problem)
print(plan)
print(strategy.predict(plan, problem).metrics.iteration_s)
run = gpp.Run(folder="outputs/mine", steps=100)
outcome = gpp.train(model, captured, problem, strategy, plan, data=({"x": x}, y), run=run)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp.app.batches import items_of, named_targets
from gpp.app.capturing import must_compare
from gpp.app.moving import check_unreplanned
from gpp.app.values import Data, Run
from gpp.app.words import with_words
from gpp.cluster import Cluster
from gpp.cost.counted import check_counted, masked_warnings
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem, check_batch
from gpp.data import tensors
from gpp.data.base import TARGET
from gpp.errors import InvalidConfig
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured
from gpp.graph.coarsen.groups import grouped_like
from gpp.models.dotted import import_named
from gpp.optimizers import AbstractOptimizer, Adam
from gpp.plan.loss_stage import LossScope, coarsen_for, loss_mask
from gpp.plan.plan import Plan
from gpp.runtime.checkpoint.resume import AUTO, Checkpoints, FoundCheckpoint, continues, find, training_of
from gpp.runtime.cut_batches import IN_STEPS, check_whole_loss, cut_warnings
from gpp.runtime.devices import check_devices
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import assemble
from gpp.runtime.job_asked import asked_model, with_asked
from gpp.runtime.run_dir import RunDir
from gpp.settings import Count, arguments
from gpp.strategy import Strategy
from gpp.timeline import Outcome

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpp.app.batches import Count as Items

    Batch = tuple[Mapping[str, Tensor], Tensor | Mapping[str, Tensor]]
    """(inputs by name, targets)."""


def capture_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    targets: Tensor | Mapping[str, Tensor],
    loss: Callable[..., Tensor | Mapping[str, Tensor]],
    metrics: Mapping[str, Callable[..., Tensor]] | None = None,
    *,
    items: Items | Mapping[str, Items] | None = None,
    imports: Sequence[str] = (),
) -> Captured:
    """The model with its loss as a graph of operators; see `gpp.capture.build.capture`.

    Args:
        inputs: example tensors of at least two samples by argument name, batch first.
        targets: likewise what the loss compares with.
        loss: (outputs, targets) -> mean over samples, or a dict of such terms whose sum is the loss.
        metrics: name -> function like `loss`.
        items: (inputs, targets) -> the number that the loss is a mean over, by term where it has several; only for a loss of
            which it is not found by itself (`gpp.capture.items`).
        imports: modules that register operators of your own, where they are not found; they are imported.
    """
    from gpp.capture.build import capture as build

    import_named(imports, "imports")
    asked = {"name": type(model).__name__, "items": items_of(items, compares=True), "imports": tuple(imports)}
    return build(model, inputs, targets, loss, dict(metrics or {}), **asked)


@arguments("")
def problem(
    captured: Captured,
    cluster: Cluster,
    *,
    minibatch_size: Count,
    optimizer: AbstractOptimizer | None = None,
    max_ops: Count | None = 64,
    microbatch_size: Count | None = None,
    cost: AbstractCostModel | None = None,
    loss_scope: LossScope = "microbatch",
    whole: Sequence[str] = (),
) -> Problem:
    """The planning problem of a captured model on a cluster; costs are analytical unless `cost` says otherwise.

    Args:
        max_ops: to which operators are grouped; None for those that were captured.
        loss_scope: `minibatch` for a loss that compares the samples of the mini-batch with each other.
        whole: paths of modules that are one operator each, as `blocks.*.attend`.

    Raises:
        InvalidConfig: the sizes do not fit a model that runs at one batch size only; `loss_scope` is `minibatch`, and the model's
            loss cannot be set apart; or `cost` counts FLOPs, and none are known of an operator.
    """
    check_batch(minibatch_size, microbatch_size)
    if loss_scope == "minibatch":
        check_whole_loss(captured, minibatch_size, IN_STEPS)
    graph = coarsen_for(captured, max_ops, loss_scope, whole)
    optimizer = optimizer or Adam(lr=1e-3)
    if isinstance(cost, Profiled):
        from gpp.capture.kept_profile import measured

        beside = {"device": cluster.devices[0].kind, "num_companions": cost.num_companions(cluster)}
        cost = measured(cost, captured, graph, largest=minibatch_size, optimizer=optimizer, **beside, recheck=warnings.warn)
    cost, only = cost or Analytical(), captured.batch
    check_counted(captured, graph, cluster, cost)
    if only and (minibatch_size % only or microbatch_size not in (None, only)):
        rule = f"must be {only}, the only size that {captured.name} runs at, and divide minibatch_size={minibatch_size}"
        raise InvalidConfig("microbatch_size", microbatch_size, rule, f"leave it out, with minibatch_size a multiple of {only}")
    made = Problem(
        graph=graph,
        cluster=cluster,
        cost=cost,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size or only,
        max_replicas=1 if only else None,
        copies=only is not None,
        optimizer_state_factor=optimizer.state_factor,
        optimizer=optimizer,
        minibatch_ops=loss_mask(captured, graph) if loss_scope == "minibatch" else 0,
    )
    return with_asked(made, optimizer, {})


def train(
    model: nn.Module,
    captured: Captured,
    problem: Problem,
    strategy: Strategy,
    plan: Plan,
    *,
    data: Data | Batch | None = None,
    loss: nn.Module | None = None,
    run: Run | None = None,
    **words: Any,
) -> Outcome:
    """Train `model` under `plan` on worker processes, by the problem's optimizer; its parameters hold the result when this returns.

    Args:
        data: (inputs by name, targets) to train on, tensors [samples, ...]; `gpp.Data` has others to evaluate on, too.
        loss: the module of the captured loss, if it is one with parameters or buffers; they hold the result, too.
        run: its steps, and the folder for the job, the ranks' logs, the checkpoints and the final weights.
        words: fields of `gpp.Data` and `gpp.Run`, as they were arguments once; a `FutureWarning` says the new form.

    Raises:
        InvalidConfig: the data is too small; there is no checkpoint to go on from, or it is that of another training; another
            run is under way in the folder.
        WorkerFailed: a worker died, and its own traceback is in the error; or a loss was not finite.
    """
    from gpp.capture.stage import initial_state
    from gpp.runtime.checkpoint import final
    from gpp.runtime.checkpoint.state import copy_into

    said = data if isinstance(data, Data) else Data(train=data)
    said, asked = with_words({Data: said, Run: run or Run()}, words, stacklevel=3).values()
    run_dir, steps = Path(asked.folder), _steps(asked, said)
    optimizer, engine = problem.optimizer or Adam(lr=1e-3), asked.engine or Distributed()
    check_unreplanned(strategy)
    if asked.imports:
        rule = "are read when a model is captured, and this one is captured"
        raise InvalidConfig("run.imports", asked.imports, rule, "say gpp.capture_model(..., imports=...)")
    if not engine.needs_weights:
        raise InvalidConfig("engine", engine.name, "trains nothing", "use Distributed()")
    if engine.planner is not None:
        rule = "builds the model from its settings, and this model has none"
        raise InvalidConfig("engine", engine.name, rule, "use Distributed()")
    splits = {"train": said.train, "test": said.held_out}
    sizes = {split: len(next(iter(named_targets(batch[1]).values()))) if batch else 0 for split, batch in splits.items()}
    check_devices(problem.cluster, engine.devices_here(problem.cluster), engine.name)
    if plan.minibatch_size > (most := sizes["train"]):
        raise InvalidConfig(
            "minibatch_size", plan.minibatch_size, f"must be at most the number of samples, {most}", "use more data"
        )
    resumed = found_checkpoint(asked, steps)
    captured, problem = _under(captured, problem, engine)
    job = assemble(
        captured,
        problem,
        plan,
        strategy,
        optimizer=optimizer,
        data=tensors.Tensors(folder=str((run_dir / "data").resolve())),
        steps=steps,
        dtype=float_type(model),
        seed=asked.seed,
        train_samples=sizes["train"],
        evaluation_samples=sizes["test"],
        overwrites=engine.overwrites,
        evaluate_every=said.evaluate_every,
        on_nonfinite=asked.on_nonfinite or "stop",
        **(asked.checkpoint or Checkpoints()).settings(resumed),
        **engine.worker_settings,
    )
    if resumed is not None:
        resumed.refuse_another(training_of(job.settings, captured))
    engine.refuse(job)
    state = initial_state(model, captured, loss)
    _warn(progress := asked.progress or Progress(), captured, problem, plan, engine)
    with RunDir(run_dir, field="run.folder") as directory:
        directory.claim(*((resumed.folder, resumed.manifest.step) if resumed else (None, 0)))
        directory.begin(joins=engine.joins)
        for split, batch in splits.items():
            if batch:
                targets = {TARGET + name: tensor for name, tensor in named_targets(batch[1]).items()}
                tensors.write(run_dir / "data", split, {**batch[0], **targets})
        job.save(run_dir, state)
        outcome = engine.execute(job, run_dir, progress)
        copy_into(model, final.load_final(run_dir), loss)
    return outcome


def _under(captured: Captured, problem: Problem, engine: AbstractEngine) -> tuple[Captured, Problem]:
    """A model and its problem under what an engine asks for, which was not known when the problem was posed; times that were
    measured are those of the operators as they were."""
    found = asked_model(captured, problem.optimizer or Adam(lr=1e-3), engine.worker_settings)
    same = found is captured or isinstance(problem.cost, Profiled)
    graph = None if same else grouped_like(found.graph, problem.graph)
    return found, problem if graph is None else replace(problem, graph=graph)


def _steps(run: Run, data: Data) -> int:
    """The steps of a training.

    Raises:
        InvalidConfig: nobody has said how many, or what to train on.
    """
    if data.train is None:
        raise InvalidConfig("data", None, "must be (inputs by name, targets)", "say data=({'x': x}, y)")
    if run.steps is None:
        raise InvalidConfig("run.steps", None, "must be how many steps to train", "say run=gpp.Run(steps=100)")
    return run.steps


def found_checkpoint(run: Run, steps: int) -> FoundCheckpoint | None:
    """The checkpoint that a run goes on from; None to begin.

    Args:
        steps: total of the training.
    """
    resume = run.resume
    if resume == AUTO:
        resume = run.folder if continues(Path(run.folder)) else None
    return None if resume is None else find(resume, steps)


def _warn(progress: Progress, captured: Captured, problem: Problem, plan: Plan, engine: AbstractEngine) -> None:
    """Tell the user what the model, the cut and the engine have to say."""
    cut = cut_warnings(captured, plan, whole_loss=bool(problem.minibatch_ops), words=IN_STEPS)
    cut += masked_warnings(captured, problem.cluster, problem.cost)
    unlike = f"the captured model was not compared with the module itself: {WITHOUT_WEIGHTS} when it was captured"
    blind = [unlike] if must_compare(captured) else []
    for words in (*captured.warnings, *blind, *cut, *engine.check(plan)):
        progress.warn(words)


def float_type(model: nn.Module) -> str:
    """torch's name of the type of a model's parameters."""
    return next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
