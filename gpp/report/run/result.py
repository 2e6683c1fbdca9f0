"""Parts of result.json in JSON's own types, which several of its keys have; `gpp.report.run.record` puts them together."""

from __future__ import annotations

import json
import math
import numbers
import os
import resource
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp.files import write_text
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.timeline import Metrics

if TYPE_CHECKING:
    from gpp.analysis.explain.order import OrderGap


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


def prediction_error(predicted: Metrics | None, measured: Metrics | None) -> float | None:
    """(measured - predicted) / predicted of the iteration time; None where either is not known."""
    if predicted is None or measured is None or not predicted.iteration_s > 0:
        return None
    return measured.iteration_s / predicted.iteration_s - 1.0


def plan_dict(
    plan: Plan, num_ops: int | None, predicted: Metrics | None, bound: Bound | None, order: OrderGap | None = None
) -> dict[str, Any]:
    """The contract's `plan`."""
    found = bound.of(plan) if bound else None
    return {
        "num_stages": len(plan.stages),
        "depth": plan.depth,
        "num_devices": plan.num_devices,
        "minibatch_size": plan.minibatch_size,
        "microbatch_sizes": {s: stage.microbatch_size for s, stage in enumerate(plan.stages)},
        "search_s": plan.search_s,
        "num_ops": sum(len(stage.ops) for stage in plan.stages) if num_ops is None else num_ops,
        "lower_bound_s": found.iteration_s if found else None,
        "optimality_gap": optimality_gap(plan, predicted, bound),
        **({} if order is None else {"order": asdict(order)}),
    }


def optimality_gap(plan: Plan | None, predicted: Metrics | None, bound: Bound | None) -> float | None:
    """(predicted - bound) / bound of the iteration time: the plan is at most that far from optimal.

    None for a plan that the bound does not cover.
    """
    found = bound.of(plan) if plan is not None and bound is not None else None
    if predicted is None or found is None or not found.iteration_s > 0:
        return None
    return predicted.iteration_s / found.iteration_s - 1.0


def peak_memory(metrics: Metrics | None) -> float | None:
    """Bytes on the fullest device."""
    return None if metrics is None else max(metrics.peak_memory_bytes.values(), default=None)


def finite(value: Any) -> Any:
    """The value in JSON's own types: numbers that are not finite become None, keys strings, tuples lists."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    number = float(value)
    return number if math.isfinite(number) else None


def write_json(path: Path | str, value: Any, *, indent: int | None = 1) -> None:
    """Write strict JSON.

    Args:
        indent: None for one line without spaces, half the size for a trace.
    """
    separators = (",", ":") if indent is None else None
    try:
        # Most values have JSON's own types already; walking a trace of many events takes longer than writing it.
        words = json.dumps(value, indent=indent, separators=separators, allow_nan=False)
    except (TypeError, ValueError):
        words = json.dumps(finite(value), indent=indent, separators=separators, allow_nan=False)
    write_text(path, words + "\n")
