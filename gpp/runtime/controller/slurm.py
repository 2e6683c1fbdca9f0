"""Workers started by Slurm, through submitit: one task a device, in a job of its own.

The run directory must be seen by all nodes; rank 0 leaves the address of the store there. submitit hands the task over
in a pickle of its own (RUN_DIR/slurm), which holds nothing but the name of `task` and the path of the run directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, final

from gpp.errors import InvalidConfig
from gpp.files import folder
from gpp.runtime.worker.parent import MODULE, PARENT, identity
from gpp.settings import Count, settings

END_S = 15.0
"""Seconds that a cancelled job is given to end."""


@final
@settings("engine.slurm")
class Slurm:
    """Options of a Slurm job.

    Args:
        executor: `slurm`, or `local` for submitit's own processes on this machine, to try it.
        time_min: limit of the job.
        more: further parameters of submitit's executor, as in {slurm_account: me, slurm_qos: high}.
    """

    executor: Literal["slurm", "local"] = "slurm"
    partition: str | None = None
    time_min: Count = 60
    more: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse a launch whose programs are not installed here.

        Raises:
            InvalidConfig: submitit, or Slurm's own commands, are missing.
        """
        try:
            import submitit  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InvalidConfig("engine.launch", "slurm", "needs submitit", "pip install -e '.[slurm]'") from error
        if self.executor == "slurm" and not shutil.which("sbatch"):
            fix = "run this on a login node, or set engine.slurm.executor=local to try it here"
            raise InvalidConfig("engine.slurm.executor", "slurm", "needs sbatch, which is not on this machine", fix)

    def submit(self, run_dir: Path, counts: Sequence[int], *, cuda: bool, threads: int, env: Mapping[str, str]) -> Any:
        """Submit the job of one task a worker.

        Args:
            counts: workers of each node; Slurm wants as many on all of them.
            env: further environment of the workers.

        Raises:
            InvalidConfig: a parameter is unknown to submitit.
        """
        import submitit  # pyright: ignore[reportMissingImports]

        executor = submitit.AutoExecutor(folder=folder(run_dir / "slurm"), cluster=self.executor)
        try:
            executor.update_parameters(
                name="gpp",
                nodes=len(counts),
                tasks_per_node=counts[0],
                cpus_per_task=threads,
                timeout_min=self.time_min,
                gpus_per_node=counts[0] if cuda else 0,
                **({"slurm_partition": self.partition} if self.partition else {}),
                **self.more,
            )
        except (ValueError, NameError, TypeError) as error:
            raise InvalidConfig("engine.slurm", dict(self.more), str(error), "see submitit's parameters") from error
        return executor.submit(task, str(run_dir.resolve()), {**env, PARENT: identity()})


def task(run_dir: str, env: dict[str, str]) -> None:
    """One task: a worker process, told its place by Slurm."""
    import submitit  # pyright: ignore[reportMissingImports]

    place = submitit.JobEnvironment()
    places = {
        # It belongs to the controller, where that is on this machine, and to this task, whose child it is.
        PARENT: f"{env[PARENT]} {identity()}",
        "RANK": place.global_rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": place.num_tasks,
    }
    # Whatever launcher the job was submitted under: the workers meet through the run directory.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "TORCHELASTIC_"))}
    code = subprocess.call(
        [sys.executable, "-m", MODULE, run_dir],
        env={**kept, **env, **{name: str(value) for name, value in places.items()}},
    )
    if code:
        raise SystemExit(code)


def word(job: Any) -> str | None:
    """How a submitted job has ended, with the last lines that it wrote; None while it may run."""
    if not job.done():
        return None
    stderr = (job.stderr() or "").strip().splitlines()[-20:]
    return "\n".join([f"the job {job.job_id} is over ({job.state}) before its workers ended", *stderr])


def finish(job: Any, ended: bool) -> None:
    """Let a job whose workers have ended come to its own end; cancel any other, and wait a moment for its end."""
    for patience_s in (END_S if ended else 0.0, END_S):
        until = time.monotonic() + patience_s
        while not job.done():
            if time.monotonic() > until:
                job.cancel()
                break
            time.sleep(0.1)
