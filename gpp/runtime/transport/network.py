"""The meeting of a job's workers: the interface that they bind, their store, and a check that they read the same job.

On one machine they meet through a file and no port is opened for it. Under a launcher with an agent (torchrun) they use
the agent's store, under one that only sets MASTER_ADDR rank 0 opens a store there, and otherwise rank 0 opens one at a
free port and writes its address into the run directory. What rank 0 opens is bound to the named interface alone.

An agent keeps one store for all attempts of a launch (`--max-restarts`), so each attempt has a part of it: `of_this_attempt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    rendezvous,  # pyright: ignore[reportPrivateImportUsage]
)

from gpp.errors import InvalidConfig, WorkerFailed
from gpp.files import descriptor, write_text
from gpp.runtime.cards.card import FAR_S
from gpp.runtime.devices import address_of, check_interface
from gpp.runtime.job import Job


def interface_of(setting: str) -> str:
    """The interface to bind: GLOO_SOCKET_IFNAME where a machine has its own name for it, else engine.interface.

    Raises:
        InvalidConfig: this machine has no such interface.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME") or setting
    for name in named.split(","):
        check_interface(name)
    return named


def program_digest(run_dir: Path) -> str:
    """Digest of a job's plan, programs and settings, which tells two jobs apart."""
    digest = hashlib.sha256()
    for name in ("plan.json", "program.txt", "evaluation.txt", "settings.json"):
        path = run_dir / "job" / name
        digest.update(path.read_bytes() if path.exists() else b"-")
    return digest.hexdigest()[:16]


def attempt() -> int:
    """The number of earlier starts of these processes by a launcher, as torchrun's --max-restarts makes; 0 without one."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def of_this_attempt(store: Store, part: str = "") -> Store:
    """A part of a launcher's store that belongs to this attempt: what an earlier one has said there is not read again."""
    return PrefixStore(f"attempt/{attempt()}/{part}", store)


def open_store(job: Job, run_dir: Path, rank: int, world: int) -> Store:
    """The store through which the workers meet."""
    limit = timedelta(seconds=job.settings.startup_timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=limit)))
        return of_this_attempt(store)
    if "MASTER_ADDR" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))
        return serve(job.settings.interface, address, port, limit) if rank == 0 else client(address, port, limit)
    ranks = run_dir / "ranks"
    if job.settings.launch == "local":
        meeting = (ranks / "rendezvous").resolve()
        os.close(descriptor(meeting, os.O_RDWR))  # ours alone: whoever reads it knows the ports of the workers
        store = FileStore(str(meeting), world)
        store.set_timeout(limit)
        return store
    path = ranks / "store.json"
    if rank == 0:
        own = address_of(interface_of(job.settings.interface).split(",")[0])
        store = serve(job.settings.interface, own, 0, limit)
        write_text(path, json.dumps({"address": own, "port": store.port}), exact=True)
        return store
    until = time.monotonic() + job.settings.startup_timeout_s
    while not path.exists():
        if time.monotonic() > until:
            raise WorkerFailed(0, f"has not come within {job.settings.startup_timeout_s:g} s (engine.startup_timeout_s)")
        time.sleep(0.1)
    found = json.loads(path.read_text())
    return client(found["address"], found["port"], limit)


def serve(interface: str, address: str, port: int, limit: timedelta) -> TCPStore:
    """Open a store at the named interface only; torch alone would listen on all of them.

    Raises:
        InvalidConfig: the address is another interface's, or the port is in use.
    """
    interface = interface_of(interface).split(",")[0]
    own = address_of(interface)
    if socket.gethostbyname(address) != own:
        raise InvalidConfig("MASTER_ADDR", address, f"is not the address of engine.interface={interface}, {own}", f"use {own}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((own, port))
    except OSError as error:
        listener.close()
        fix = "set another MASTER_PORT, or another engine.master_port"
        raise InvalidConfig("MASTER_PORT", port, f"cannot be bound on {own} ({error.strerror})", fix) from error
    listener.listen(1024)
    port = listener.getsockname()[1]
    # The store takes the descriptor over and closes it.
    return TCPStore(own, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def client(address: str, port: int, limit: timedelta) -> TCPStore:
    """A connection to a store that another process keeps."""
    return TCPStore(address, port, None, False, limit, wait_for_workers=False)


def meet(job: Job, run_dir: Path, store: Store, rank: int, world: int) -> None:
    """Wait until every rank has come, and compare the jobs that they read.

    Raises:
        WorkerFailed: some have not come in time, or read another job; names them.
        InvalidConfig: they are on several machines, which the loopback interface does not join.
    """
    mine = f"{program_digest(run_dir)} {socket.gethostname()}"
    store.set(f"gpp/here/{rank}", mine)
    keys = [f"gpp/here/{other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=job.settings.startup_timeout_s))
    except dist.DistError as error:
        late = [other for other, key in enumerate(keys) if not store.check([key])]
        if late:
            names = f"ranks {', '.join(map(str, late))} have" if len(late) > 1 else f"rank {late[0]} has"
            limit = f"{job.settings.startup_timeout_s:g} s (engine.startup_timeout_s)"
            raise WorkerFailed(late[0], f"{names} not come within {limit}") from error
        raise
    read = [store.get(key).decode().split(" ", 1) for key in keys]
    other = next((r for r, (digest, _) in enumerate(read) if digest != read[0][0]), None)
    if other is not None:
        raise WorkerFailed(other, f"read another job below {run_dir} than rank 0. Fix: copy RUN_DIR/job to every machine again")
    hosts = sorted({host for _, host in read})
    if len(hosts) > 1 and interface_of(job.settings.interface) == "lo":
        raise InvalidConfig(
            "engine.interface", "lo", f"does not join {', '.join(hosts)}", "name the interface that does, as in eth0"
        )


PINGS = 4


def clock_offset_s(store: Store, rank: int, world: int, boot: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to add to this rank's performance counter to get rank 0's: every machine counts from its own start.

    The quickest of a few exchanges through the store decides, as in NTP; on rank 0's own machine the clocks are one.

    Args:
        boot: number that tells this machine's clock from others': the first of
            `gpp.runtime.transport.shared_memory.place`.
    """
    store.set(f"gpp/boot/{rank}", str(boot))
    others = [r for r in range(1, world) if store.get(f"gpp/boot/{r}") != store.get("gpp/boot/0")]
    if rank == 0:
        for key in (f"{r}/{i}" for r in others for i in range(PINGS)):
            store.get(f"gpp/ping/{key}")
            store.set(f"gpp/pong/{key}", repr(clock()))
    if rank not in others:
        return 0.0
    found = []
    for i in range(PINGS):
        before = clock()
        store.set(f"gpp/ping/{rank}/{i}", "")
        theirs = float(store.get(f"gpp/pong/{rank}/{i}"))
        after = clock()
        # The first exchange also waits for rank 0 to come to this rank.
        found.append((after - before, theirs - (before + after) / 2))
    return min(found)[1]


def join(job: Job, store: Store, rank: int, world: int) -> None:
    """Make the process group of all ranks, through the store at which they met.

    With NCCL the group is bound to this process's card, so that communicators are made when they are asked for, and not
    by the first message, when others may wait for something else.
    """
    dist.init_process_group(
        job.settings.backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=FAR_S),
        device_id=torch.device("cuda", torch.cuda.current_device()) if job.settings.backend == "nccl" else None,
    )
