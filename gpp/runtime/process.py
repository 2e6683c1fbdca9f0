"""One worker process: how it begins, connects, writes down what happens, and ends."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gpp.runtime.job import Job

KEPT_STEPS = 8
"""Steps whose events a worker keeps for the measured timeline: the last ones."""


def write_line(out: TextIO, record: dict[str, Any]) -> None:
    """One JSON line, visible to the controller at once."""
    out.write(json.dumps(record) + "\n")
    out.flush()


def _die_with_parent() -> None:
    """End this process when its controller is gone, so that no orphan stays behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def connect(job: Job, run_dir: Path, rank: int, world: int) -> None:
    """Join the process group of a job: by the launcher's rendezvous where there is one, else by a file."""
    settings = job.settings
    os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", settings.interface)
    # A launcher of several machines names its own rendezvous; on one machine a file binds no port at all.
    external = "MASTER_ADDR" in os.environ
    dist.init_process_group(
        settings.backend,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=settings.timeout_s),
        init_method="env://" if external else f"file://{(run_dir / 'ranks' / 'rendezvous').resolve()}",
    )


def guarded(run_dir: Path, run: Callable[[Job, Path, int, int, torch.device], None]) -> None:
    """Run this process's share of a job and end the process; what goes wrong is written down for the controller."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (run_dir / "ranks").mkdir(exist_ok=True)
    _die_with_parent()
    code = 0
    try:
        job = Job.load(run_dir)
        torch.set_num_threads(job.settings.threads)
        device = torch.device("cpu")
        if job.settings.device_kind == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
            torch.cuda.set_device(device)
        run(job, run_dir, rank, world, device)
    except Exception as error:
        report = {
            "rank": rank,
            "time": time.time(),
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        (run_dir / "ranks" / f"rank_{rank}.error.json").write_text(json.dumps(report))
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A process group left open by a failure would block the interpreter's normal exit.
    os._exit(code)
