"""Memory of this process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory() -> None:
    """Count the peak from now on, so that each job of a sweep has its own (Linux, where the kernel allows it)."""
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_memory_bytes() -> int:
    """Largest number of bytes of physical memory that the process has held since the last reset, or since its start."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
