"""A check that the processes of a worker's family are alive, from its first instant on. This module is free of torch.

A worker ends with whoever started it. The kernel is asked to see to that; but it can be asked only once Python runs, and
a starter that died before is one that the worker has never seen: its parent is then a stranger that took it over. So
the starter hands its identity down, and the worker compares:

* `run.py`, a Slurm task and a process that forks workers put their identity into GPP_PARENT. All that are named there
  must live, as far as they are on this machine: a Slurm task on the controller's own machine ends with both.
* torchrun hands nothing down, but its command line names the worker's module, and a stranger's does not.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PARENT = "GPP_PARENT"
"""Environment variable with identities, separated by spaces."""

MODULE = "gpp.runtime.worker"

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_PROC = Path("/proc")


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
"""glibc gives freed activations back to the kernel and faults them in again a micro-batch later; keeping them
made a step of 3 ms stages a quarter shorter."""


def worker_environment(num_threads: int) -> dict[str, str]:
    """Environment variables of every worker's process."""
    threads = str(num_threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **KEEP_MEMORY}


def identity() -> str:
    """This process's identity, which no other process ever has: its id alone is given away again after its end."""
    return "/".join((str(os.getpid()), str(_started(os.getpid())), *_place()))


def _place() -> tuple[str, str]:
    """The scope of a process id: the boot of the machine and the namespace; empty where the kernel does not say."""
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return boot, os.readlink(_PROC / "self" / "ns" / "pid")
    except OSError:
        return "", ""


def _started(pid: int) -> int | None:
    """The start of a process, in ticks since the boot; None if it has ended or cannot be seen."""
    try:
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22 of proc_pid_stat(5).
    return None if words[0] in "ZX" else int(words[19])


def _lives(said: str) -> bool:
    """Whether the process of an identity is alive; True for one of another machine, which cannot be asked."""
    pid, _, rest = said.partition("/")
    started, _, place = rest.partition("/")
    if place != "/".join(_place()) or not (pid.isdecimal() and started.isdecimal()):
        return True
    return _started(int(pid)) == int(started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The parent of this process, and the processes named in GPP_PARENT."""

    parent: int
    said: tuple[str, ...]

    def alive(self) -> bool:
        """Whether all processes of the family live."""
        return os.getppid() == self.parent and all(map(_lives, self.said))


def signal_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> Family:
    """Ask the kernel to end this process with its parent, even if it is stopped; end it now if one of those is gone.

    After a fork it is to be called again: the kernel forgets, and the parent is another.
    """
    family = Family(parent=os.getppid(), said=tuple(os.environ.get(PARENT, "").split()))
    signal_with_parent(signal.SIGKILL)
    # Whoever dies from here on takes this process along; whoever died before is not alive now.
    if not family.alive() or not (family.said or _is_launcher(family.parent)):
        os._exit(1)
    return family


def _is_launcher(parent: int) -> bool:
    """Whether a parent may be the torchrun that started this process; True where there is none, or it cannot be seen."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    try:
        return MODULE.encode() in (_PROC / str(parent) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
