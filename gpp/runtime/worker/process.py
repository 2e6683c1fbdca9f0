"""The process of one worker: it begins, connects, writes down what happens, and ends.

ranks/rank_N.status      what it is doing (gpp/runtime/hang_detection/status.py)
      rank_N.error.json  why it failed: kind `error`, `hang`, `lost` (its connection to another rank), `ended` (SIGTERM)
      rank_N.clock.json  how far its clock is from rank 0's, where they may be on several machines
      rank_N.end.json    that it came to its end, with which job, and how long the files are that it leaves
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gpp.errors import Exhausted, GppError, InvalidConfig, WorkerFailed
from gpp.files import folder, write_text
from gpp.files import open_lines as open_lines_of
from gpp.private import MaskedStream
from gpp.program.communicators import communicators
from gpp.program.program import reduce_groups, teams
from gpp.runtime.cards.card import FAR_S, AbstractCard
from gpp.runtime.devices import check_devices
from gpp.runtime.hang_detection.diagnosis import Diagnosis
from gpp.runtime.hang_detection.status import ENDED, FINISHING, SILENT, STARTING, AbstractStatus, Status, status_path
from gpp.runtime.hang_detection.watchdog import Watchdog
from gpp.runtime.job import Job
from gpp.runtime.transport.cards import CardTransport, StagedTransport
from gpp.runtime.transport.channels import AbstractTransport, TorchTransport
from gpp.runtime.transport.network import clock_offset_s, interface_of, join, meet, open_store, program_digest
from gpp.runtime.transport.shared_memory import place
from gpp.runtime.worker.around import AbstractStageWeights
from gpp.runtime.worker.clock import CardClock, HostClock
from gpp.runtime.worker.parent import end_with_parent
from gpp.runtime.worker.seat import Seat

KEPT_STEPS = 8
"""Steps whose events a worker keeps for the measured timeline: the last ones."""

BEAT_S = 0.25

_GLOO = re.compile(r"\[(enforce fail at )?(\S*/)?gloo/\S+:\d+\] ")
"""How an error of gloo begins: the place in its source, as `[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] `."""


def open_lines(run_dir: Path, rank: int) -> TextIO:
    """The file of a worker's lines, which the controller reads while it grows."""
    return open_lines_of(run_dir / "ranks" / f"rank_{rank}.jsonl")


def write_line(out: TextIO, record: dict[str, Any]) -> None:
    """One JSON line, visible to the controller at once."""
    out.write(json.dumps(record) + "\n")


class Lines:
    """A worker's lines in a file.

    Args:
        holds: whether the line of a step is held until `flush`. It takes 60 us, in which other devices may wait for this one; a
            worker that waits for messages in every step has that time then.
    """

    def __init__(self, out: TextIO, *, holds: bool) -> None:
        self._out, self._holds = out, holds
        self._held: dict[str, Any] | None = None

    def step(self, record: dict[str, Any]) -> None:
        """Take a line that may be held back, and write the one that was."""
        self.flush()
        if self._holds:
            self._held = record
        else:
            write_line(self._out, record)

    def write(self, record: dict[str, Any]) -> None:
        """Write a line at once."""
        self.flush()
        write_line(self._out, record)

    def flush(self) -> None:
        """Write the line that was held back."""
        if self._held is not None:
            held, self._held = self._held, None
            write_line(self._out, held)


def write_device(
    run_dir: Path, device: int, peak_bytes: int, steps: Iterable[dict[str, Any]], weights: Mapping[int, AbstractStageWeights]
) -> None:
    """Write a device's measurements down, for the timeline of the run.

    Args:
        steps: records of its last steps, with their events.
        weights: by stage, those under a policy with versions.
    """
    found = {
        "device": device,
        "peak_memory_bytes": peak_bytes,
        "steps": list(steps),
        "weight_versions": {s: own.copies for s, own in weights.items()},
        "staleness": {s: own.staleness for s, own in weights.items()},
    }
    write_text(run_dir / "ranks" / f"device_{device}.json", json.dumps(found), exact=True)


def _keep_alive(status: Status) -> None:
    """Give signs of life, and end this process when its launcher is gone, so that no orphan stays behind."""
    family = end_with_parent()

    def beat() -> None:
        while family.alive():
            status.beat()
            time.sleep(BEAT_S)
        os._exit(1)

    threading.Thread(target=beat, daemon=True).start()


def _note_end(ranks: Path, rank: int) -> None:
    """Write down that the launcher ends this process (because another one failed), unlike a process that was killed.

    A handler alone would run when the backend's wait returns, which may be never: a thread reads of the signal.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        report(ranks, rank, WorkerFailed(rank, "ended by its launcher (SIGTERM)"), "ended")
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def connect(job: Job, run_dir: Path, rank: int, world: int, store: Store | None = None) -> AbstractStatus:
    """Join the process group of a job; returns where the caller may say what it does.

    Args:
        store: in which all ranks meet, where the process is the user's own, whose signals stay as they are; None to open one.

    Raises:
        InvalidConfig: this machine lacks the interface to bind.
        WorkerFailed: not all ranks came in time, or one read another job.
    """
    settings, ranks = job.settings, run_dir / "ranks"
    status = Status(status_path(ranks, rank))
    status.enter(STARTING)
    if settings.launch != "local" and store is None:
        _note_end(ranks, rank)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(job.settings.interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    store = store or open_store(job, run_dir, rank, world)
    meet(job, run_dir, store, rank, world)
    watchdog = None
    if settings.launch != "local":
        watchdog = Watchdog(job, ranks, rank=rank, world=world, store=store, report=lambda d: _hang(ranks, rank, d))
    join(job, store, rank, world)
    if watchdog:
        watchdog.start()
        offset_s = clock_offset_s(store, rank, world, place()[0])
        write_text(ranks / f"rank_{rank}.clock.json", json.dumps({"offset_s": offset_s}), exact=True)
    status.enter(SILENT)
    return status


def disconnect(status: AbstractStatus) -> None:
    """Leave the process group together with all others: nobody closes a connection that another still reads from."""
    status.enter(FINISHING)
    status.waiting(True)
    dist.barrier()
    status.enter(ENDED)
    dist.destroy_process_group()


def _hang(ranks: Path, rank: int, diagnosis: Diagnosis) -> None:
    error = WorkerFailed(diagnosis.rank, diagnosis.reason)
    report(ranks, rank, error, "hang", out=len(diagnosis.out))
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def report(ranks: Path, rank: int, error: BaseException, kind: str, **more: Any) -> None:
    """Write down why this rank fails; the first report stays."""
    path = ranks / f"rank_{rank}.error.json"
    if path.exists():
        return
    ours = isinstance(error, GppError)
    text = error.reason if isinstance(error, WorkerFailed) else str(error) if ours else f"{type(error).__name__}: {error}"
    found = {
        "rank": rank,
        "cause": error.rank if isinstance(error, WorkerFailed) else rank,
        "kind": kind,
        "time": time.time(),
        "host": socket.gethostname(),
        "error": text,
        "traceback": "" if ours else "".join(traceback.format_exception(error)),
        "out": 0,
        **more,
    }
    write_text(path, json.dumps(found))


def kind_of(error: BaseException) -> str:
    """The kind of an error: this rank's own, or the trace that another rank's end leaves here.

    torch has a class for what its own backends raise; gloo raises a bare `RuntimeError` that begins with its line.
    """
    lost = isinstance(error, dist.DistError) or (type(error) is RuntimeError and _GLOO.match(str(error)))
    return "lost" if lost else "error"


def _place() -> tuple[int, int]:
    """This process's rank and the number of workers, from its launcher."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        sys.exit(
            "error: a worker is started by run.py or torchrun, which set RANK and WORLD_SIZE. "
            "Fix: torchrun --nproc-per-node N -m gpp.runtime.worker RUN_DIR, or python run.py"
        )


def enter(
    job: Job,
    run_dir: Path,
    rank: int,
    world: int,
    device: torch.device,
    card: AbstractCard | None = None,
    store: Store | None = None,
) -> Seat:
    """Begin a worker of the project's own runtime: its device of the plan, with transport and status.

    Args:
        card: the accelerator that `device` is; None for a processor.
        store: as `connect` has it.

    Raises:
        InvalidConfig: not as many workers as the plan has devices.
    """
    devices = job.plan.devices
    if world != len(devices):
        rule = f"the plan has {len(devices)} devices, and every one is a worker"
        fix = f"start {len(devices)} workers in all (torchrun: --nnodes, --nproc-per-node)"
        raise InvalidConfig("WORLD_SIZE", world, rule, fix)
    status = connect(job, run_dir, rank, world, store)
    status.enter(STARTING)
    transport = transport_of(job, devices[rank], card)
    clock = CardClock(card) if card else HostClock()
    return Seat(device_id=devices[rank], device=device, transport=transport, status=status, clock=clock, card=card)


def transport_of(job: Job, device: int, card: AbstractCard | None) -> AbstractTransport:
    """The transport of a device of the plan; all workers make theirs together."""
    rank_of = {other: rank for rank, other in enumerate(job.plan.devices)}
    if card and job.settings.backend == "nccl":
        programs = [job.program, *([job.evaluation] if job.evaluation else [])]
        made = communicators(reduce_groups(job.plan, job.graph), *programs, replicas=teams(job.plan))
        return CardTransport(card, made, device=device, rank_of=rank_of)
    settings = job.settings
    gloo = TorchTransport(
        job.plan, job.graph, device=device, rank_of=rank_of, shared_memory=settings.shared_memory, timeout_s=FAR_S
    )
    return StagedTransport(card, gloo) if card else gloo


def device_of(job: Job, local_rank: int) -> torch.device:
    """The device of a worker by its number on its machine; a card is the process's current one from now on.

    Raises:
        InvalidConfig: there is no such card.
    """
    if job.settings.device_kind != "cuda":
        return torch.device("cpu")
    shared = job.settings.workers_per_card
    device = torch.device("cuda", local_rank // shared)
    check_devices(job.cluster, local_rank // shared + 1, "distributed")
    torch.cuda.set_device(device)
    if shared > 1:
        # None takes what the plan has given to another.
        torch.cuda.set_per_process_memory_fraction(1.0 / shared, device)
    return device


def clear_rank(ranks: Path, rank: int) -> None:
    """Remove what an earlier worker of this rank has said of itself."""
    for name in ("status", "error.json", "clock.json", "end.json", "finite.json"):
        (ranks / f"rank_{rank}.{name}").unlink(missing_ok=True)


def guarded(run_dir: Path, run: Callable[[Job, Path, int, int, torch.device], None], job: Job | None = None) -> None:
    """Run this process's share of a job and end the process; a failure is written down for the controller.

    Args:
        job: None to read it from `run_dir`.
    """
    rank, world = _place()
    if not (run_dir / "job" / "settings.json").is_file():
        sys.exit(f"error: {run_dir} holds no job. Fix: give the run directory that run.py wrote, or copy it to this machine")
    ranks = run_dir / "ranks"
    folder(ranks)
    clear_rank(ranks, rank)
    # What the user's code prints goes into the ranks' logs.
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)  # type: ignore[assignment]
    code = 0
    try:
        _keep_alive(Status(status_path(ranks, rank)))
        job = job or Job.load(run_dir)
        torch.set_num_threads(job.settings.threads)
        torch.autograd.set_detect_anomaly(job.settings.on_nonfinite == "trace")
        run(job, run_dir, rank, world, device_of(job, int(os.environ.get("LOCAL_RANK", rank))))
        left = (*ranks.glob(f"rank_{rank}.*json*"), *ranks.glob("device_*.json"))
        files = {path.name: path.stat().st_size for path in left}
        end = {"rank": rank, "job": program_digest(run_dir), "host": socket.gethostname(), "files": files}
        write_text(ranks / f"rank_{rank}.end.json", json.dumps(end), exact=True)
    except Exception as raised:
        error = Exhausted.of(raised) or raised
        # On a full disk the controller has the exit code, and standard error if that goes elsewhere.
        with suppress(OSError):
            report(ranks, rank, error, kind_of(error))
        if isinstance(error, GppError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A process group left open by a failure would block the interpreter's normal exit.
    os._exit(code)
