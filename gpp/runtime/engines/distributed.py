"""The distributed engine: one worker process for each device; the same code uses gloo on CPU and NCCL on CUDA."""

from __future__ import annotations

from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from gpp.cluster import Cluster
from gpp.errors import InvalidConfig
from gpp.plan.plan import Plan
from gpp.private import secret_settings
from gpp.runtime.controller.slurm import Slurm
from gpp.runtime.devices import check_interface
from gpp.runtime.engine import AbstractServer, Progress, crowded
from gpp.runtime.job import Job, job_parts
from gpp.runtime.mode import course_run
from gpp.runtime.task import EngineTask
from gpp.settings import Count, Seconds, settings
from gpp.timeline import Outcome

Port = Annotated[int, Field(ge=1, le=65535)]


@final
@settings("engine")
class Distributed(AbstractServer):
    """Runs a plan for real.

    Args:
        interface: network interface to bind; loopback unless the user names another.
        launch: who starts the workers: `local`: this process, here; `external`: the user, by the commands that it
            prints; `slurm`: a job of one task a device; `env`: torchrun or srun has started this command once for each
            device; `collect`: nobody, they have ended and `ranks/` is copied back.
        timeout_s: a run in which no rank moves or computes for so long has failed; the rank that is the cause is named.
        startup_timeout_s: the limit for loading and connecting, and for writing a checkpoint.
        nodes: machines of an external or Slurm launch; None for the nodes of the cluster that the plan uses.
        master_addr, master_port: of an external launch, and of `env` where the launcher does not say: where the workers
            meet, on the machine of rank 0.
        autocast: bfloat16 or float16 (with a loss scale): forwards compute in it where PyTorch's autocast does, and float32
            messages travel in it; None: as captured.
        workers_per_card: workers that share a card. With more than one, messages go by gloo over pinned main memory.
        shared_memory: whether messages between workers of one machine go through shared memory; else through gloo.
        paced: whether a worker on a processor takes as much longer for its passes as its device is slower than the fastest one
            (`speed_factor`): to try a plan for unequal devices on equal cores, with real computation and messages.
        enforce_memory: whether a worker on a processor may hold no more than its device's memory: the run ends where an allocation
            is beyond it, as on a card.
        compile: torch.compile every stage with this backend (inductor, aot_eager); None: as captured.
    """

    own_runtime: ClassVar[bool] = True
    own_weights: ClassVar[bool] = True
    bounds_memory: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = True
    name: str = "distributed"
    interface: str = "lo"
    launch: Literal["local", "external", "slurm", "env", "collect"] = "local"
    timeout_s: Seconds = 600.0
    startup_timeout_s: Seconds = 900.0
    nodes: Count | None = None
    master_addr: str | None = None
    master_port: Port = 29500
    slurm: Slurm = field(default_factory=Slurm)
    autocast: Literal["bfloat16", "float16"] | None = None
    compile: str | None = None
    shared_memory: bool = True
    workers_per_card: Count = 1
    paced: bool = False
    enforce_memory: bool = False

    @property
    def worker_settings(self) -> dict[str, Any]:
        names = ("interface", "startup_timeout_s", "timeout_s", "autocast", "compile", "shared_memory")
        names += ("workers_per_card", "paced", "enforce_memory")
        # To the workers all other launches are one: they may be on several machines.
        launch = "local" if self.launch == "local" else "external"
        return {"launch": launch, **{name: getattr(self, name) for name in names}}

    def devices_here(self, cluster: Cluster) -> int:
        # Workers that others start count the devices of their own machines.
        return -(-cluster.num_devices // self.workers_per_card) if self.launch == "local" else 0

    def check(self, plan: Plan) -> tuple[str, ...]:
        if self.compile is not None:
            _check_backend(self.compile)
        if self.launch == "slurm":
            self.slurm.check()
        warnings = list[str]()
        if (count := min(self.workers_per_card, plan.num_devices)) > 1:
            warnings.append(
                f"{count} workers share a card: their messages go by gloo over pinned main memory, because NCCL refuses two ranks "
                "on one card; measured times are not those of a card for each worker"
            )
        if self.launch != "local":
            return tuple(warnings)
        check_interface(self.interface)
        return (*warnings, *crowded(plan))

    @property
    def rehearses(self) -> bool:
        # What a rehearsal measures is seconds of the processor, in which a device that waits is as fast as any.
        return self.launch == "local" and self.compile is None and not self.paced

    def refuse_plan(self, plan: Plan, task: EngineTask) -> None:
        for part in job_parts(plan.mechanisms):
            part.refuse_plan(plan, task)

    @property
    def joins(self) -> bool:
        return self.launch == "collect"

    def refuse(self, job: Job) -> None:
        for part in job_parts(job.mechanisms):
            part.refuse(job)
        if self.workers_per_card > 1 and job.settings.device_kind != "cuda":
            rule = f"cluster={job.cluster.name} has no cards to share"
            raise InvalidConfig("engine.workers_per_card", self.workers_per_card, rule, "leave it out, or use cluster=local_gpus")
        if self.paced and job.settings.device_kind == "cuda":
            fix = "leave it out, or use a cluster of processors"
            raise InvalidConfig("engine.paced", True, "is for workers on processors; a card takes the time that it takes", fix)
        if self.enforce_memory:
            _check_bounded(job)
        if self.launch == "env":
            from gpp.runtime.controller.leader import Leader

            if Leader.running is None:
                rule = "is a way to start run.py, and this is another program"
                raise InvalidConfig("engine.launch", "env", rule, "use local, external or slurm")
            Leader.running.check(job.plan.num_devices, "plan.devices")
        if self.launch == "external" and (found := secret_settings(asdict(job.settings))):
            rule = f"starts workers by hand, who would not know {next(iter(found))}: no file holds a secret"
            fix = "let your code read it from an environment variable of its own, or use engine.launch=env or slurm"
            raise InvalidConfig("engine.launch", "external", rule, fix)
        if self.launch in ("external", "slurm"):
            from gpp.runtime.controller.follow import machines

            self._check_machines(machines(job, self.nodes))

    def execute(self, job: Job, run_dir: Path, progress: Progress) -> Outcome:
        from gpp.runtime.checkpoint.final import finish_final
        from gpp.runtime.controller import follow
        from gpp.runtime.controller.collected import collect
        from gpp.runtime.controller.controller import run_workers

        if (course := course_run(job)) is not None:
            return course.execute(job, run_dir, progress)
        if self.launch == "local":
            logs = run_workers("gpp.runtime.worker.main", job, run_dir, job.plan.num_devices, progress)
        elif self.launch == "env":
            from gpp.runtime.controller.leader import Leader

            assert Leader.running is not None, "refused without"
            logs = Leader.running.run(job, run_dir, progress)
        elif self.launch == "collect":
            logs = follow.gather(job, run_dir, progress)
        else:
            counts = follow.machines(job, self.nodes)
            if self.launch == "slurm":
                logs = follow.run_slurm(job, run_dir, progress, self.slurm, counts)
            else:
                logs = follow.run_external(job, run_dir, progress, counts, self.master_addr or "127.0.0.1", self.master_port)
        finish_final(logs.job or job, run_dir)  # of workers that others have started
        return collect(logs.job or job, run_dir, logs)

    def _check_machines(self, counts: tuple[int, ...]) -> None:
        """Refuse settings that cannot join several machines."""
        if min(counts) < 1:
            raise InvalidConfig("engine.nodes", len(counts), f"there are {sum(counts)} workers", "use one machine a worker at most")
        if len(counts) > 1 and self.interface == "lo":
            rule = f"the loopback interface does not join {len(counts)} machines"
            raise InvalidConfig("engine.interface", "lo", rule, "name the one that does, as in engine.interface=eth0")
        if len(counts) > 1 and self.launch == "external" and self.master_addr is None:
            rule = f"{len(counts)} machines meet at the address of the first"
            raise InvalidConfig("engine.master_addr", None, rule, "set engine.master_addr to its address on engine.interface")
        if self.launch == "slurm" and len(set(counts)) > 1:
            rule = f"gives the nodes {', '.join(map(str, counts))} workers, and Slurm's tasks are as many on every node"
            raise InvalidConfig("engine.nodes", len(counts), rule, "set engine.nodes to a number that divides the workers")


def _check_bounded(job: Job) -> None:
    """Refuse to bound workers where that cannot be done."""
    from gpp.runtime.worker.limit import why_not

    if job.settings.compile is not None:
        rule = "engine.enforce_memory cannot tell a stage's memory from the compiler's, which works while the stage runs"
        raise InvalidConfig("engine.compile", job.settings.compile, rule, "set engine.compile=null, or engine.enforce_memory=false")
    if job.settings.device_kind == "cuda":
        rule = "is for workers on processors; a card's allocator has the card's memory as its bound"
        raise InvalidConfig("engine.enforce_memory", True, rule, "leave it out, or use cluster=local")
    if reason := why_not():
        raise InvalidConfig("engine.enforce_memory", True, reason, "leave it out, or run on Linux 4.7 or later")


def _check_backend(name: str) -> None:
    import torch

    # The short list, without backends for debugging; those may be named too.
    known = torch.compiler.list_backends()
    if name not in torch.compiler.list_backends(exclude_tags=()):
        raise InvalidConfig("engine.compile", name, f"must be one of {', '.join(known)}, or null", "set engine.compile=inductor")
