"""Profiles that are kept: an operator graph is measured once, and a start checks whether that still holds.

Operators take half as long again while other programs use the caches and cores, though only seconds of computing are counted.
So two of them are timed once more beside every profile, alone and at best, and again in a third of a second at a later start:
`GraphProfile.outdated` judges.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpp.capture.profiler import MIN_REPEATS, clock_of, fill, one_pass, profile, setting_of, threads
from gpp.capture.stage import build_stage
from gpp.cost.load import Load
from gpp.cost.models.profiled import GraphProfile, Profiled, Spot, sample_counts
from gpp.graph.captured import Captured
from gpp.graph.op_graph import Op, OpGraph
from gpp.serialization import check_sealable

SPOT_S, SPOTS, SPOTS_S = 0.02, 2, 0.3
"""Seconds that a checked operator takes at most, their number, and the seconds of a check, in which the load of the machine, which
is counted in hundredths of a second, is seen to a few percent."""


def measured(
    cost: Profiled,
    captured: Captured,
    graph: OpGraph,
    *,
    largest: int,
    device: str = "cpu",
    optimizer: Any = None,
    num_companions: int = 0,
    recheck: Callable[[str], None] | None = None,
) -> Profiled:
    """`cost` with the profile of `graph`, from disk if the file covers `largest` samples, else measured.

    Args:
        captured: the model.
        graph: its operators, usually coarsened.
        largest: samples of the largest micro-batch that one device will have.
        device: torch device to measure on.
        optimizer: an `AbstractOptimizer` whose step is timed too; None leaves the update to the fallback.
        num_companions: busy devices beside the measured one, as in `cost.num_companions`.
        recheck: is told, in a line, that the profile on disk holds no more and is taken again; None: it is not checked.
    """
    setting = setting_of(device, cost.num_threads, optimizer.kind if optimizer else "", num_companions)
    counts = sample_counts(largest) if captured.batch is None else (captured.batch,)
    found = cost.load(graph, setting)
    if found is not None and recheck and (why := _outdated(captured, graph, found)):
        recheck(why)
        found = None
    if found is None or found.sample_counts[-1] < counts[-1]:
        check_sealable(cost.path(graph, setting), "cost.cache_dir")
        found = profile(
            captured,
            graph,
            device=device,
            sample_counts=counts,
            num_threads=cost.num_threads,
            budget_s=cost.budget_s,
            optimizer=optimizer,
            num_companions=num_companions,
        )
        found = replace(found, spots=_spots(captured, graph, found, torch.device(device)))
        cost.store(graph, found)
    return cost.add(found)


def _outdated(captured: Captured, graph: OpGraph, profile: GraphProfile) -> str | None:
    """Why a profile of this machine holds no more; None for one that holds, or that nothing can be said of."""
    load, device = Load(), torch.device(profile.setting.device_kind)
    with threads(profile.setting.num_threads):
        now_s = [_spot_s(captured, graph.ops[spot.op], spot.samples, device) for spot in profile.spots]
    if not profile.outdated(now_s, share := load.share()):
        return None
    factor = statistics.fmean(now / spot.seconds for now, spot in zip(now_s, profile.spots, strict=True))
    return (
        f"operators take {factor:.2f} times what their profile says, which was taken while other programs had {profile.others:.0%} "
        f"of the processors ({share:.0%} now): it is taken again"
    )


def _spots(captured: Captured, graph: OpGraph, profile: GraphProfile, device: torch.device) -> tuple[Spot, ...]:
    """The longest operators that take little, at the most samples of which there are any; on a card none."""
    for column, samples in reversed(list(enumerate(profile.sample_counts))) if device.type == "cpu" else ():
        took = {op: profile.forward_s[op][column] + profile.backward_s[op][column] for op in range(graph.num_ops)}
        short = sorted((op for op, seconds in took.items() if 0 < seconds <= SPOT_S), key=lambda op: (-took[op], op))
        if len(short) >= min(SPOTS, graph.num_ops):
            with threads(profile.setting.num_threads):
                return tuple(
                    Spot(op=op, samples=samples, seconds=_spot_s(captured, graph.ops[op], samples, device)) for op in short[:SPOTS]
                )
    return ()


def _spot_s(captured: Captured, op: Op, samples: int, device: torch.device) -> float:
    """Seconds of an operator's forward and backward, at best: what else runs can only make them longer."""
    module = build_stage(captured, list(op.nodes), device=device)
    fill(module)
    forward, seeds = one_pass(module, samples, device)
    clock, seen = clock_of(device), list[float]()
    end = time.perf_counter() + SPOTS_S / SPOTS
    while len(seen) < MIN_REPEATS or time.perf_counter() < end:
        begin = clock()
        if roots := forward() if seeds else []:
            torch.autograd.backward(roots, seeds)
        else:
            forward()
        seen.append(clock() - begin)
    return max(min(seen[1:]), 1e-9)
