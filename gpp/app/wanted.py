"""The request of a user of `gpp.parallelize`, checked; and the problem, the plan and the job that follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpp.app import api
from gpp.app.api import found_checkpoint
from gpp.app.batches import items_of, loss_of
from gpp.app.capturing import LOOKED_AT, only_size
from gpp.app.moving import check_unreplanned
from gpp.app.uneven import from_examples
from gpp.app.values import Loss, Planning, Run
from gpp.cluster import Cluster
from gpp.cost.counted import masked_warnings
from gpp.cost.models.profiled import Profiled
from gpp.cost.problem import Problem
from gpp.data import tensors
from gpp.data.base import TARGET
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.models.dotted import import_named
from gpp.optimizers import AbstractOptimizer
from gpp.plan.plan import Plan
from gpp.runtime.checkpoint.resume import Checkpoints, training_of
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.cut_batches import OF_A_LOOP, check_whole_loss, cut_warnings
from gpp.runtime.devices import check_devices
from gpp.runtime.engines.distributed import Distributed
from gpp.runtime.job import Job, assemble
from gpp.runtime.job_asked import asked_model, with_asked
from gpp.runtime.task import EngineTask
from gpp.settings import Count, settings
from gpp.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from gpp.capture.given import ModelInputs

ENDLESS = 1_000_000_000
"""Steps of a training whose end is not said."""


@final
@settings("")
class Wanted:
    """Arguments of `gpp.parallelize`, of the same names.

    Args:
        examples: the example inputs, taken apart (`gpp.capture.given.ModelInputs`).
        size: samples of the examples.
        cluster: what `devices` stands for.
        made: a torch optimizer.
        planning: what `strategy` stands for, with a `gpp.Strategy` in it.
        place: this process's among the ranks of a launch; None where it is the only one.
    """

    model: Any
    examples: Any
    size: Count
    cluster: Cluster
    optimizer: AbstractOptimizer
    made: Any = None
    loss: Loss
    planning: Planning
    run: Run
    place: LaunchPlace | None = None

    def __post_init__(self) -> None:
        import_named(self.run.imports, "run.imports")
        check_unreplanned(self.strategy)
        if not isinstance(self.engine, Distributed):
            raise InvalidConfig("engine", self.engine.name, "does not train step by step", "use gpp.Distributed(), or gpp.train")
        if not self.strategy.schedule.drains:
            fix = "use a schedule that drains (OneFOneB, GPipe, ZeroBubbleH1), or gpp.train, which has all data"
            rule = "does not drain, and a step ends before the next batch is known"
            raise InvalidConfig("strategy", self.strategy.name, rule, fix)
        shape = self.optimizer.learning_rate.shape
        if shape != "constant" and self.run.steps is None:
            raise InvalidConfig("steps", None, f"learning rate {shape} follows them", "say run=gpp.Run(steps=...)")
        if self.engine.launch not in ("local", "env"):
            rule = "starts workers elsewhere, and this program feeds its workers itself"
            fix = "leave it out; for several machines start the program on each of them: by torchrun, or by srun with launch='env'"
            raise InvalidConfig("engine.launch", self.engine.launch, rule, fix)
        if self.place is None:
            check_devices(self.cluster, self.engine.devices_here(self.cluster), self.engine.name)
            return
        if self.engine.enforce_memory:
            rule = "bounds a process, and under a launcher that is the user's own"
            raise InvalidConfig("engine.enforce_memory", True, rule, "leave it out, or start the program without a launcher")

    @property
    def strategy(self) -> Strategy:
        return self.planning.made

    @property
    def engine(self) -> Distributed:
        return self.run.engine or Distributed()

    def capture(self, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], given: ModelInputs | None = None) -> Captured:
        """The model at the sizes of a mini-batch; one that runs at one batch size only at that of a micro-batch.

        Args:
            given: the inputs as they were given, for the constants among them; None for those of the examples.
        """
        from gpp.capture.build import capture

        def captured(batch: int | None = None) -> Captured:
            model, loss = self.model, loss_of(self.loss.function, bool(targets))
            # torch.export takes a batch of one sample for a constant.
            two = [
                {name: t if len(t) > 1 else t.repeat(2, *[1] * (t.dim() - 1)) for name, t in g.items()} for g in (inputs, targets)
            ]
            asked: dict[str, Any] = {"name": type(self.model).__name__, "batch": batch, "imports": self.run.imports}
            asked["items"] = items_of(self.loss.items, bool(targets))
            positional, named = (given or self.examples).arguments(two[0])
            metrics = {n: loss_of(m, bool(targets), f"metrics.{n}") for n, m in (self.loss.metrics or {}).items()}
            return capture(model, named or positional, two[1], loss, metrics, **asked)

        found = captured()
        b = only_size(self.planning.microbatch_size, self.size)
        found = found if found.batch in (None, b) else captured(b)
        return asked_model(found, self.optimizer, self.engine.worker_settings)

    def of_rows(self, rows: Mapping[str, Tensor], given: ModelInputs) -> Captured:
        """The model at the sizes of a mini-batch by captured names, with the constants of its inputs."""
        if given.constants != self.examples.constants:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.constants.items())
            self.run.progress.warn(f"the model is captured again for {shown}: what is no tensor is a constant of a capture")
        targets = {name.removeprefix(TARGET): tensor for name, tensor in rows.items() if name.startswith(TARGET)}
        return self.capture({name: tensor for name, tensor in rows.items() if not name.startswith(TARGET)}, targets, given)

    def problem(self, captured: Captured) -> Problem:
        """The planning problem."""
        if self.loss.scope == "minibatch":
            check_whole_loss(captured, self.size, OF_A_LOOP)
        made = api.problem(
            captured,
            self.cluster,
            minibatch_size=self.size,
            optimizer=self.optimizer,
            microbatch_size=captured.batch or self.planning.microbatch_size,
            cost=self.planning.cost or Profiled(cache_dir=os.environ.get("GPP_CACHE", "~/.cache/gpp")),
            loss_scope=self.loss.scope,
        )
        clips = self.optimizer.clip_norm is not None
        made = replace(made, refuses=self.engine.limits(EngineTask.of_problem(captured, made, clips=clips)))
        made = with_asked(made, self.optimizer, self.engine.worker_settings)
        return from_examples(made, captured, self.planning.uneven, self.examples.tensors)

    def planned(self, problem: Problem) -> Plan:
        """The plan that was given, proved to fit, or the strategy's."""
        plan = self.planning.plan
        if plan is None:
            return self.strategy.plan(problem)
        self.strategy.check(plan, problem)
        return plan

    def job(self, captured: Captured, problem: Problem, plan: Plan) -> Job:
        """The job of the workers.

        Raises:
            InvalidConfig: the engine cannot run it; there are not as many ranks as devices.
        """
        engine, run = self.engine, self.run
        resumed = found_checkpoint(run, run.steps or ENDLESS)
        own: dict[str, Any] = engine.worker_settings | {"launch": "local" if self.place is None else "external"}
        made = assemble(
            captured,
            problem,
            plan,
            self.strategy,
            optimizer=self.optimizer,
            data=tensors.Tensors(folder=str(Path(run.folder, "data").resolve())),
            steps=run.steps or ENDLESS,
            dtype=api.float_type(self.model),
            seed=run.seed,
            train_samples=self.size,
            evaluation_samples=self.size,
            uneven=self.planning.uneven if self.planning.uneven.amount else None,
            on_nonfinite=run.on_nonfinite or "warn",
            overwrites=engine.overwrites,
            **(run.checkpoint or Checkpoints()).settings(resumed),
            **own,
        )
        if resumed is not None:
            resumed.refuse_another(training_of(made.settings, captured))
        replace(engine, launch="local").refuse(made)
        if self.place and plan.num_devices != self.place.world:
            rule = f"every rank is the worker of a device, and {self.place.world} were started (WORLD_SIZE)"
            fix = f"start {plan.num_devices}, or say strategy='even', which takes all devices"
            raise InvalidConfig("plan.devices", plan.num_devices, rule, fix)
        return made

    def warnings(self, captured: Captured, plan: Plan, rows: Mapping[str, Tensor]) -> tuple[str, ...]:
        """What the user is to know before the first step.

        Args:
            rows: the examples, by captured names.
        """
        from gpp.capture.coupling import uneven

        whole_loss, some = self.loss.scope == "minibatch", {name: rows[name][:LOOKED_AT] for name in captured.rows}
        cut = cut_warnings(captured, plan, whole_loss=whole_loss, words=OF_A_LOOP, uneven=uneven(captured, some))
        masked = masked_warnings(captured, self.cluster, self.planning.cost) if self.planning.cost else ()
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
    for name, module in model.named_modules():
        if isinstance(module, jit.ScriptModule):
            rule = "is a script, which cannot be captured"
            raise InvalidConfig(f"model.{name}", type(module).__name__, rule, "put the module itself there")
    for name, param in model.named_parameters():
        if is_lazy(param):
            rule = f"has no shape yet: its {type(param).__name__} waits for a first batch"
            raise InvalidConfig(f"model.{name}", "lazy", rule, "call the model once on the examples before")
    _check_apart(model)
    return model


def _check_apart(model: Any) -> None:
    """Refuse a trained parameter whose memory another parameter or buffer has, too.

    Raises:
        InvalidConfig: names both.
    """
    found: list[tuple[int, int, str, bool]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and not tensor.is_sparse and tensor.numel() and tensor.is_contiguous():
            begin = tensor.data_ptr()
            found.append((begin, begin + tensor.nbytes, name, tensor.requires_grad))
    before = (0, 0, "", False)
    for one in sorted(found):
        if one[0] < before[1] and (one[3] or before[3]):
            rule = f"is the same memory as {before[2]}, and workers would have one of each"
            raise InvalidConfig(f"model.{one[2]}", "shared", rule, "tie them: let both modules hold the same nn.Parameter")
        before = one if one[1] > before[1] else before
