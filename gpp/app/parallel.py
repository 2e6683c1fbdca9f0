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
from typing import TYPE_CHECKING, Any

from gpp.app.batches import examples_size, named_targets
from gpp.app.optimizer_factory import optimizer_of
from gpp.app.pipeline import Pipeline
from gpp.app.values import Loss, Planning, Run, planning_of
from gpp.app.wanted import Wanted, plain_module
from gpp.app.words import with_words
from gpp.cluster import Cluster, local
from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.data.base import TARGET
from gpp.plan.plan import Plan
from gpp.runtime.controller.place import LaunchPlace, world_of
from gpp.runtime.engine import Progress
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import Job
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gpp.app.batches import Inputs, Targets
    from gpp.app.optimizer_factory import GivenOptimizer


def parallelize(
    model: nn.Module,
    example_inputs: Inputs,
    example_targets: Targets = None,
    *,
    loss: Loss | Callable[..., Tensor | Mapping[str, Tensor]] | None = None,
    devices: int | Cluster | None = None,
    optimizer: GivenOptimizer = None,
    strategy: str | Strategy | Plan | Planning | None = None,
    run: Run | None = None,
    **words: Any,
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
        loss: (outputs, targets) -> mean over samples or over items, a function or a module; `gpp.Loss` says more of one. None takes
            the `loss` of the model's own outputs.
        devices: so many cores of this machine, or a cluster (`gpp.local_gpus()`); None for two, and under a launcher for one each
            rank.
        optimizer: settings of one (`gpp.Adam`); or one of torch's over the model's parameters, or a function (params) -> one, whose
            class and settings every worker makes its own of (`gpp.app.optimizer_factory`); Adam(lr=1e-3) if None.
        strategy: words as on the command line (`even`, `graphpipe planner.patience=20`), a `gpp.Strategy`, a plan that was made
            before, or `gpp.Planning`, which has more to say; graphpipe if None. It must drain after every mini-batch, since the
            next one is not known.
        run: folder, seed, checkpoints, what to resume, and settings of the workers.
        words: fields of `gpp.Loss`, `gpp.Planning` and `gpp.Run`, and what they are called elsewhere (`n_microbatches`,
            `mixed_precision`, `checkpoint_dir`). They are understood, and a `FutureWarning` says the new form; what is not is
            answered by what to write.

    Raises:
        InvalidConfig: names what cannot be, the rule and the fix.
        CaptureError: the model cannot be captured; names the line.
        Infeasible: no plan fits.
        WorkerFailed: a worker could not start; under a launcher also where rank 0 has failed.
    """
    from gpp.capture.given import given as taken_apart
    from gpp.models.losses import module_of

    warn = (run.progress if run and run.progress else Progress()).warn
    model = plain_module(model, warn)
    examples, targets = taken_apart(model, example_inputs), named_targets(example_targets)
    size = examples_size({**examples.tensors, **targets})
    criterion = loss if isinstance(loss, Loss) else Loss(function=loss)
    values = {Loss: criterion, Planning: planning_of(strategy), Run: run or Run()}
    values = with_words(values, words, size=size, stacklevel=3)
    criterion, asked = values[Loss], values[Run]
    place = _place(asked.engine or Distributed())
    count = devices if devices is not None else place.world if place else 2
    chosen, made = optimizer_of(optimizer, model, module_of(criterion.function))
    wanted = Wanted(
        model=model,
        examples=examples,
        size=size,
        cluster=count if isinstance(count, Cluster) else local(num_devices=count),
        optimizer=chosen,
        made=made,
        loss=criterion,
        planning=values[Planning],
        run=replace(asked, folder=str(asked.folder), progress=asked.progress or Progress()),
        place=place,
    )
    if place is not None:
        return _joined(wanted, place, examples.tensors, targets)
    problem, job = _planned(wanted, examples.tensors, targets)
    return Pipeline(wanted, problem, job)


def _place(engine: Distributed) -> LaunchPlace | None:
    """This process's place among the ranks of a launch; None where it is the only one, and starts workers."""
    launched = "RANK" in os.environ and (world_of(os.environ) or 1) > 1
    if engine.launch != "env" and not launched:
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
        wanted.run.progress.warn(words)
    return problem, job


def _joined(wanted: Wanted, place: LaunchPlace, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Pipeline:
    """The pipeline of one rank among several."""
    from gpp.runtime.controller.leader import Leader
    from gpp.runtime.live.ranks import place_in

    engine = wanted.engine
    meeting = place_in(place, interface=engine.interface, limit_s=engine.startup_timeout_s)
    if not isinstance(meeting, Leader):
        path, hold = meeting.take()
        job = Job.load(path)
        problem = Problem(graph=job.graph, cluster=job.cluster, cost=Analytical(), minibatch_size=job.plan.minibatch_size)
        return Pipeline(replace(wanted, run=replace(wanted.run, folder=str(path))), problem, job, meeting, hold)
    try:
        problem, job = _planned(wanted, inputs, targets)
        return Pipeline(wanted, problem, job, meeting)
    except BaseException as error:
        meeting.end(1, str(error) or type(error).__name__)
        raise
