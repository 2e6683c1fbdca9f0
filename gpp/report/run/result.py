"""result.json: the contract of a run, written for every end."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpp.files import write_text
from gpp.graph.captured import Checked
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.timeline import Emulation, Metrics, Versions

if TYPE_CHECKING:
    from gpp.analysis.explain.order import OrderGap

Status: TypeAlias = Literal["ok", "infeasible", "failed"]


def result_dict(
    *,
    status: Status,
    model: str,
    strategy: str,
    cluster: str,
    engine: str,
    seed: int,
    reason: str | None = None,
    configuration: str | None = None,
    plan: Plan | None = None,
    num_ops: int | None = None,
    predicted: Metrics | None = None,
    measured: Metrics | None = None,
    loss: list[float] | None = None,
    loss_terms: Mapping[str, Sequence[float]] | None = None,
    final_metric: dict[str, float] | None = None,
    bound: Bound | None = None,
    order: OrderGap | None = None,
    compared: list[dict[str, Any]] | None = None,
    best: dict[str, str | None] | None = None,
    max_batch: list[dict[str, Any]] | None = None,
    planning_peak_bytes: int | None = None,
    resumed: dict[str, Any] | None = None,
    emulation: Emulation | None = None,
    idle_s: Mapping[str, float] | None = None,
    versions: Versions | None = None,
    replaced: Sequence[Any] = (),
    gains: Sequence[Mapping[str, Any]] = (),
    answers: Mapping[str, int] | None = None,
    checked: Checked | None = None,
) -> dict[str, Any]:
    """The contract's dict, with JSON's own types: string keys, and null where a number is not finite.

    Args:
        reason: why the run is not ok.
        configuration: hash of the settings that decide the result; the key is left out of runs without one.
        plan, predicted: None where the run ended before there was one; null in the file.
        num_ops: operators of the graph that was planned.
        planning_peak_bytes: peak memory of this process until the plan and its prediction were there.
        loss: one value per step; a resumed run has its own steps only.
        loss_terms: the same for each term of a loss that has several; the key is left out of other runs.
        resumed: the step from which a resumed run went on, and its checkpoint; the key is left out of other runs.
        bound: a time that no plan can beat; null in the file where it is not known.
        order: the distance of the schedule from the best order of its passes; the key is left out of plans without explanation.
        compared: the attempts of several strategies on one problem; the key is left out of other runs.
        best: of these, the names of the best `synchronous` and `asynchronous` ones; the key is left out of other runs.
        max_batch: the largest micro-batch of each of several strategies; the key is left out of other runs.
        emulation: how emulated devices were measured; the key is left out of other runs.
        idle_s: seconds of a step for which a device waits, a mean over the devices, by reason; the key is left out of runs without
            an explanation.
        versions: weight versions in an engine that trains without a timeline (`reference`); the key is left out of
            other runs.
        gains: the plan's time beside that of the best chain and of one device (`gpp.report.run.gain_words.gain_dicts`); the key is
            left out of other runs.
        answers: samples that a stream was asked for, and how many were `answered`; the key is left out of other runs.
        checked: how the captured model was compared with the user's own module, and the seconds that it took; the key is left out
            of models that are not captured.
        replaced: plans that were replaced while they served (`gpp.replan.Replaced`); the key is left out of other runs.
    """
    more: dict[str, Any] = {} if compared is None else {"compared": compared}
    if best is not None:
        more["best"] = best
    if max_batch is not None:
        more["max_batch"] = max_batch
    if configuration is not None:
        more["configuration"] = configuration
    if loss_terms:
        more["loss_terms"] = {name.removeprefix("loss:"): values for name, values in loss_terms.items()}
    if resumed is not None:
        more["resumed"] = resumed
    for name, value in (("emulation", emulation), ("versions", versions), ("checked", checked)):
        if value is not None:
            more[name] = asdict(value)
    if idle_s is not None:
        more["idle_s"] = dict(idle_s)
    if gains:
        more["gains"] = [dict(gain) for gain in gains]
    more |= {"answers": dict(answers)} if answers else {}
    if replaced:
        more["replaced"] = [asdict(one) for one in replaced]
    return finite(
        {
            "status": status,
            "reason": reason,
            "model": model,
            "strategy": strategy,
            "cluster": cluster,
            "engine": engine,
            "seed": seed,
            "plan": None if plan is None else plan_dict(plan, num_ops, predicted, bound, order),
            "predicted": None if predicted is None else asdict(predicted),
            "measured": None if measured is None else asdict(measured),
            "prediction_error": prediction_error(predicted, measured),
            "loss": loss or [],
            "final_metric": final_metric or {},
            **more,
            "planning_peak_bytes": planning_peak_bytes,
        }
    )


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


def finite(value: Any) -> Any:
    """The same value in JSON's own types: numbers that are not finite become None, keys strings, tuples lists."""
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
