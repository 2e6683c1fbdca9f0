"""The platform from Python, without Hydra: capture, problem, plan, train.

captured = gpp.capture_model(model, {"x": x[:4]}, y[:4], loss)
cost = gpp.Profiled(cache_dir="~/.cache/gpp")
problem = gpp.problem(captured, gpp.local(num_devices=2), minibatch_size=64, optimizer=gpp.Adam(lr=1e-3), cost=cost)
strategy = gpp.Strategy(name="graphpipe", planner=gpp.GraphPipe(), schedule=gpp.OneFOneB())
plan = strategy.plan(problem)
print(plan)
print(strategy.predict(plan, problem).metrics.iteration_s)
outcome = gpp.train(model, captured, problem, strategy, plan, data=({"x": x}, y), steps=100, run_dir="outputs/mine")
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpp.app.batches import items_of, named_targets
from gpp.app.moving import check_unreplanned
from gpp.cluster import Cluster
from gpp.cost.counted import check_counted, masked_warnings
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.data import tensors
from gpp.data.base import TARGET
from gpp.errors import InvalidConfig
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured
from gpp.optimizers import AbstractOptimizer, Adam
from gpp.plan.loss_stage import LossScope, coarsen_for, loss_mask
from gpp.plan.plan import Plan
from gpp.runtime.checkpoint.resume import AUTO, Checkpoints, FoundCheckpoint, continues, find, training_of
from gpp.runtime.cut_batches import check_whole_loss, cut_warnings
from gpp.runtime.devices import check_devices
from gpp.runtime.engine import AbstractEngine, Progress
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import assemble
from gpp.runtime.job_asked import with_asked
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
) -> Captured:
    """The model with its loss as a graph of operators; see `gpp.capture.build.capture`.

    Args:
        inputs: example tensors of at least two samples by argument name, batch first.
        targets: likewise what the loss compares with.
        loss: (outputs, targets) -> mean over samples, or a dict of such terms whose sum is the loss.
        metrics: name -> function like `loss`.
        items: (inputs, targets) -> the number that the loss is a mean over, by term where it has several; only for a loss of
            which it is not found by itself (`gpp.capture.items`).
    """
    from gpp.capture.build import capture as build

    counts = items_of(items, compares=True)
    return build(model, inputs, targets, loss, dict(metrics or {}), name=type(model).__name__, items=counts)


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
    if loss_scope == "minibatch":
        check_whole_loss(captured, minibatch_size)
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
    data: Batch,
    steps: int,
    run_dir: str | Path,
    loss: nn.Module | None = None,
    held_out: Batch | None = None,
    optimizer: AbstractOptimizer | None = None,
    seed: int = 0,
    evaluate_every: int = 0,
    on_nonfinite: Literal["stop", "warn", "trace"] = "stop",
    engine: AbstractEngine | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoints | None = None,
    resume: str | Path | None = None,
) -> Outcome:
    """Train `model` under `plan` on worker processes; its parameters hold the result when this returns.

    Args:
        data: (inputs by name, targets) to train on, tensors [num_samples, ...].
        loss: the module of the captured loss, if it is one with parameters or buffers; they hold the result, too.
        held_out: likewise to evaluate on.
        on_nonfinite: `stop` raises at the first loss that is not finite; `warn` says so and goes on; `trace` raises
            at the first gradient that is NaN, too, and names the function that made it.
        run_dir: folder for the job, the ranks' logs, the checkpoints and the final weights.
        resume: a run directory to go on from; `steps` still counts from the very first step, and `model` need not hold
            the weights that it had then. `auto`: `run_dir` itself, if it has a checkpoint; else the training begins.

    Raises:
        InvalidConfig: the data is too small; `resume` has no checkpoint, or that of another training; another run is
            under way in `run_dir`.
        WorkerFailed: a worker died, and its own traceback is in the error; or a loss was not finite.
    """
    from gpp.capture.stage import initial_state
    from gpp.runtime.checkpoint import final
    from gpp.runtime.checkpoint.state import copy_into

    run_dir = Path(run_dir)
    optimizer, engine = optimizer or Adam(lr=1e-3), engine or Distributed()
    check_unreplanned(strategy)
    _refuse_engine(engine)
    splits = {"train": data, "test": held_out}
    sizes = {split: _num_samples(batch) if batch else 0 for split, batch in splits.items()}
    check_devices(problem.cluster, engine.devices_here(problem.cluster), engine.name)
    if plan.minibatch_size > (most := sizes["train"]):
        raise InvalidConfig(
            "minibatch_size", plan.minibatch_size, f"must be at most the number of samples, {most}", "use more data"
        )
    resumed = _found(resume, run_dir, steps)
    job = assemble(
        captured,
        problem,
        plan,
        strategy,
        optimizer=optimizer,
        data=tensors.Tensors(folder=str((run_dir / "data").resolve())),
        steps=steps,
        dtype=float_type(model),
        seed=seed,
        train_samples=sizes["train"],
        evaluation_samples=sizes["test"],
        overwrites=engine.overwrites,
        evaluate_every=evaluate_every,
        on_nonfinite=on_nonfinite,
        **(checkpoint or Checkpoints()).settings(resumed),
        **engine.worker_settings,
    )
    if resumed is not None:
        resumed.refuse_another(training_of(job.settings, captured))
    engine.refuse(job)
    state = initial_state(model, captured, loss)
    _warn(progress := progress or Progress(), captured, problem, plan, engine)
    with RunDir(run_dir, field="run_dir") as directory:
        directory.claim(resumed.folder if resumed else None, resumed.manifest.step if resumed else 0)
        directory.begin(joins=engine.joins)
        _write(run_dir / "data", splits)
        job.save(run_dir, state)
        outcome = engine.execute(job, run_dir, progress)
        copy_into(model, final.load_final(run_dir), loss)
    return outcome


def _found(resume: str | Path | None, run_dir: Path, steps: int) -> FoundCheckpoint | None:
    """The checkpoint to go on from; None to begin."""
    if resume == AUTO:
        resume = run_dir if continues(run_dir) else None
    return None if resume is None else find(resume, steps)


def _refuse_engine(engine: AbstractEngine) -> None:
    """Refuse an engine that does not train a model in memory."""
    if not engine.needs_weights:
        raise InvalidConfig("engine", engine.name, "trains nothing", "use Distributed()")
    if engine.planner is not None:
        rule = "builds the model from its settings, and this model has none"
        raise InvalidConfig("engine", engine.name, rule, "use Distributed()")


def _warn(progress: Progress, captured: Captured, problem: Problem, plan: Plan, engine: AbstractEngine) -> None:
    """Tell the user what the model, the cut and the engine have to say."""
    cut = cut_warnings(captured, plan, whole_loss=bool(problem.minibatch_ops), whole_model=False)
    cut += masked_warnings(captured, problem.cluster, problem.cost)
    unlike = f"the captured model was not compared with the module itself: {WITHOUT_WEIGHTS} when it was captured"
    blind = [unlike] if captured.checked and captured.checked.unknown == WITHOUT_WEIGHTS else []
    for words in (*captured.warnings, *blind, *cut, *engine.check(plan)):
        progress.warn(words)


def float_type(model: nn.Module) -> str:
    """torch's name of the type of a model's parameters."""
    return next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")


def _num_samples(batch: Batch) -> int:
    return len(next(iter(named_targets(batch[1]).values())))


def _write(folder: Path, splits: Mapping[str, Batch | None]) -> None:
    for split, batch in splits.items():
        if batch:
            targets = {TARGET + name: tensor for name, tensor in named_targets(batch[1]).items()}
            tensors.write(folder, split, {**batch[0], **targets})
