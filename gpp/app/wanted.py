"""The request of a user of `gpp.parallelize`, checked; and the problem, the plan and the job that follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from gpp.app import api
from gpp.app.batches import items_of, loss_of
from gpp.app.capturing import LOOKED_AT, only_size
from gpp.app.moving import check_unreplanned
from gpp.cluster import Cluster
from gpp.cost.counted import masked_warnings
from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.data import tensors
from gpp.data.base import TARGET
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.optimizers import AbstractOptimizer
from gpp.plan.loss_stage import LossScope
from gpp.plan.plan import Plan
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.cut_batches import cut_warnings
from gpp.runtime.devices import check_devices
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import Job, assemble
from gpp.runtime.job_asked import with_asked
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.settings import Count, Seed, settings
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

ENDLESS = 1_000_000_000
"""Steps of a training whose end is not said."""

Launch = Literal["local", "ranks"]


@final
@settings("")
class Wanted:
    """Arguments of `gpp.parallelize`, of the same names.

    Args:
        examples: the example inputs, taken apart (`gpp.capture.given.ModelInputs`).
        size: samples of the examples.
        made: a torch optimizer.
    """

    model: Any
    examples: Any
    size: Count
    cluster: Cluster
    optimizer: AbstractOptimizer
    made: Any = None
    loss: Any = None
    items: Any = None
    metrics: Any = None
    strategy: Strategy = field(default_factory=lambda: Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB()))
    plan: Plan | None = None
    microbatch_size: Count | None = None
    loss_scope: LossScope = "microbatch"
    cost: AbstractCostModel | None = None
    steps: Count | None = None
    lengths: Count = 16
    seed: Seed = 0
    run_dir: str = "outputs/pipeline"
    engine: Distributed = field(default_factory=Distributed)
    progress: Any = None
    place: LaunchPlace | None = None

    def __post_init__(self) -> None:
        check_unreplanned(self.strategy)
        if not self.strategy.schedule.drains:
            fix = "use a schedule that drains (OneFOneB, GPipe, ZeroBubbleH1), or gpp.train, which has all data"
            rule = "does not drain, and a step ends before the next batch is known"
            raise InvalidConfig("strategy", self.strategy.name, rule, fix)
        shape = self.optimizer.learning_rate.shape
        if shape != "constant" and self.steps is None:
            raise InvalidConfig("steps", None, f"learning rate {shape} follows them", "say how many there will be")
        if self.engine.launch not in ("local", "env"):
            rule = "starts workers elsewhere, and this program feeds its workers itself"
            fix = "leave it out; to use several machines start the program on all of them, by torchrun or srun (launch='ranks')"
            raise InvalidConfig("engine.launch", self.engine.launch, rule, fix)
        if self.place is None:
            check_devices(self.cluster, self.engine.devices_here(self.cluster), self.engine.name)
            return
        if self.engine.enforce_memory:
            rule = "bounds a process, and under a launcher that is the user's own"
            raise InvalidConfig("engine.enforce_memory", True, rule, "leave it out, or use launch='local'")

    def capture(self, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Captured:
        """The model at the sizes of a mini-batch; one that runs at one batch size only at that of a micro-batch."""
        from gpp.capture.build import capture

        def captured(batch: int | None = None) -> Captured:
            model, loss = self.model, loss_of(self.loss, bool(targets))
            # torch.export takes a batch of one sample for a constant.
            two = [
                {name: t if len(t) > 1 else t.repeat(2, *[1] * (t.dim() - 1)) for name, t in g.items()} for g in (inputs, targets)
            ]
            asked = {"name": type(self.model).__name__, "batch": batch, "items": items_of(self.items, bool(targets))}
            positional, named = self.examples.arguments(two[0])
            return capture(model, named or positional, two[1], loss, dict(self.metrics or {}), **asked)

        found = captured()
        b = only_size(self.microbatch_size, self.size)
        return found if found.batch in (None, b) else captured(b)

    def of_rows(self, rows: Mapping[str, Tensor]) -> Captured:
        """The model at the sizes of a mini-batch by captured names."""
        targets = {name.removeprefix(TARGET): tensor for name, tensor in rows.items() if name.startswith(TARGET)}
        return self.capture({name: tensor for name, tensor in rows.items() if not name.startswith(TARGET)}, targets)

    def problem(self, captured: Captured) -> Problem:
        """The planning problem."""
        made = api.problem(
            captured,
            self.cluster,
            minibatch_size=self.size,
            optimizer=self.optimizer,
            microbatch_size=captured.batch or self.microbatch_size,
            cost=self.cost or Profiled(cache_dir=os.environ.get("GPP_CACHE", "~/.cache/gpp")),
            loss_scope=self.loss_scope,
        )
        return with_asked(made, self.optimizer, self.engine.worker_settings)

    def planned(self, problem: Problem) -> Plan:
        """The plan that was given, proved to fit, or the strategy's."""
        if self.plan is None:
            return self.strategy.plan(problem)
        self.strategy.check(self.plan, problem)
        return self.plan

    def job(self, captured: Captured, problem: Problem, plan: Plan) -> Job:
        """The job of the workers.

        Raises:
            InvalidConfig: the engine cannot run it; there are not as many ranks as devices.
        """
        engine = self.engine
        own: dict[str, Any] = engine.worker_settings | {"launch": "local" if self.place is None else "external"}
        made = assemble(
            captured,
            problem,
            plan,
            self.strategy,
            optimizer=self.optimizer,
            data=tensors.Tensors(folder=str(Path(self.run_dir, "data").resolve())),
            steps=self.steps or ENDLESS,
            dtype=api.float_type(self.model),
            seed=self.seed,
            train_samples=self.size,
            evaluation_samples=self.size,
            on_nonfinite="warn",
            overwrites=engine.overwrites,
            **own,
        )
        replace(engine, launch="local").refuse(made)
        if self.place and plan.num_devices != self.place.world:
            rule = f"every rank is the worker of a device, and {self.place.world} were started (WORLD_SIZE)"
            fix = f"start {plan.num_devices}, or say plan=... or another strategy, as gpp.Even, which takes all devices"
            raise InvalidConfig("plan.devices", plan.num_devices, rule, fix)
        return made

    def warnings(self, captured: Captured, plan: Plan, rows: Mapping[str, Tensor]) -> tuple[str, ...]:
        """What the user is to know before the first step.

        Args:
            rows: the examples, by captured names.
        """
        from gpp.capture.coupling import uneven

        whole_loss, some = self.loss_scope == "minibatch", {name: rows[name][:LOOKED_AT] for name in captured.rows}
        cut = cut_warnings(captured, plan, whole_loss=whole_loss, whole_model=False, uneven=uneven(captured, some))
        masked = masked_warnings(captured, self.cluster, self.cost) if self.cost else ()
        return (
            *captured.warnings,
            *cut,
            *masked,
            *replace(self.engine, launch="local" if self.place is None else "env").check(plan),
        )


def plain_module(model: Any, warn: Callable[[str], None]) -> Any:
    """The module inside wrappers whose work the pipeline does itself.

    Args:
        warn: is told of a wrapper whose work nobody does.

    Raises:
        InvalidConfig: it is no module, or a script; its parameters are not there yet, or two of them are one memory.
    """
    from torch import jit, nn
    from torch.nn.parameter import is_lazy

    if not isinstance(model, nn.Module):
        raise InvalidConfig("model", type(model).__name__, "must be a torch.nn.Module", "put the functions into one")
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        warn("torch.compile of the model is left out; engine=Distributed(compile='inductor') compiles its stages")
        return plain_module(inner, warn)
    if type(model) in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        return plain_module(model.module, warn)
    if isinstance(model, jit.ScriptModule):
        raise InvalidConfig("model", type(model).__name__, "is a script, which cannot be captured", "pass the module itself")
    memory: dict[tuple[int, int], str] = {}
    for name, param in model.named_parameters():
        if is_lazy(param):
            rule = f"has no shape yet: its {type(param).__name__} waits for a first batch"
            raise InvalidConfig(f"model.{name}", "lazy", rule, "call the model once on the examples before")
        if param.requires_grad and param.numel() and not param.is_meta:
            other = memory.setdefault((param.data_ptr(), param.numel()), name)
            if other != name:
                rule = f"is the same memory as {other}, and workers would have one of each"
                raise InvalidConfig(f"model.{name}", "shared", rule, "tie them: let both modules hold the same nn.Parameter")
    return model
