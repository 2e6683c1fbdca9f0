"""Measured times: a table of seconds for each operator and sample count, read without torch.

`gpp.capture.profiler` measures the table; here it is interpolated and kept on disk, by content, so that a model is
measured once on a machine and planned from as often as one likes.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, final

import numpy as np
from pydantic import Field

from gpp.cluster import Cluster, Device
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.base import AbstractCostModel, OpTimes
from gpp.cost.models.in_place import StageTimes, corrected, update_s_per_byte
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.serialization import seal, to_json, unseal
from gpp.settings import Count, Natural, Positive, Share, settings

CHANGED = 1.25
"""Factor by which operators' times at a start may differ from those beside the profile. On two cores that nineteen programs wanted,
thirty checks of the same two operators differed from the first by 16 % at most in one of them, and by 10 % in both at once."""

QUIETER = 0.05
"""Share of the processors that others must have less, at least, than when a profile was taken, for it to be taken again: times
that are too long because of them would be so again."""

MOST_APART = 1.1
"""Seconds of both passes of a backward that leaves gradients of weights for later, for each second of one, up to which it does."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting of a measurement: all that it depends on beside the graph.

    Args:
        device_kind: `cpu` or `cuda`.
        device_name: the processor's or the card's name.
        torch_version: the version of the library that ran the operators.
        num_threads: CPU threads of one device.
        optimizer: the optimizer whose step was timed; empty if none was.
        companions: other devices of the machine that were busy meanwhile.
        rate: mini-batches per second of the runs in which stages were timed in place; None where the next pass always waited.
    """

    device_kind: str
    device_name: str
    torch_version: str
    num_threads: int = 1
    optimizer: str = ""
    companions: int = 0
    rate: Annotated[float | None, Field(exclude_if=lambda rate: rate is None)] = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """An operator that was timed once more, alone on the machine, so that the same can be done in milliseconds at a later start.

    Args:
        op: the operator.
        samples: the samples of its passes.
        seconds: the seconds of a forward and a backward, at best.
    """

    op: Natural
    samples: Count
    seconds: Positive


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """Seconds of every operator of one graph on one kind of device.

    Args:
        graph_fingerprint: of the (coarsened) graph; covers shapes and dtype.
        sample_counts: ascending.
        forward_s, backward_s: [num_ops][len(sample_counts)] seconds.
        update_s_per_byte: optimizer step for each byte of trainable parameter; None if it was not measured.
        move_s_per_byte: reading or writing memory; None if it was not measured.
        pass_s: seconds of a forward and of a backward of a stage that computes nothing; not in the operators' times.
        in_place: stages of plans that were timed as they run, the latest last; operator times are corrected by them.
        weight_share: of each operator's backward, the share that can be left for later, of the gradients of weights, as measured at
            the most samples; 0 for one that stays whole. Empty if it was not measured.
        apart: seconds of both passes of each over those of the whole backward; 0 for operators that can leave nothing.
        others: share of this machine's processors that other programs had meanwhile.
        messages: seconds of a message at either end, in place, for each second that it takes between workers that do nothing else.
        spots: operators by whose times a later start sees whether the profile still holds; empty where it is not checked.
    """

    graph_fingerprint: str
    setting: Setting
    sample_counts: tuple[int, ...]
    forward_s: tuple[tuple[float, ...], ...]
    backward_s: tuple[tuple[float, ...], ...]
    update_s_per_byte: float | None = None
    pass_s: tuple[float, float] = (0.0, 0.0)
    move_s_per_byte: float | None = None
    in_place: tuple[StageTimes, ...] = ()
    weight_share: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()
    others: Share = 0.0
    messages: Positive = 1.0
    spots: tuple[Spot, ...] = ()

    def __post_init__(self) -> None:
        counts = self.sample_counts
        if not counts or counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
            raise InvalidConfig("profile.sample_counts", counts, "must be ascending positive integers", "measure again")
        if len(self.forward_s) != len(self.backward_s) or any(len(row) != len(counts) for row in self.forward_s + self.backward_s):
            raise InvalidConfig(
                "profile", self.graph_fingerprint, "needs one time for each operator and sample count", "measure again"
            )
        if any(len(row) not in (0, len(self.forward_s)) for row in (self.weight_share, self.apart)):
            raise InvalidConfig("profile", self.graph_fingerprint, "needs one share for each operator, or none", "measure again")

    def at(self, samples: int) -> OpTimes:
        """Times for `samples` samples.

        Linear between measured counts; proportional to the samples beyond the largest; the smallest's below it.
        """
        counts, forward_s, backward_s = self.tables
        forward, backward = (_interpolate(table, counts, samples) for table in (forward_s, backward_s))
        share = np.array(self.weight_share) if self.weight_share else np.zeros_like(backward)
        return OpTimes(forward_s=forward, backward_s=backward, weight_s=backward * share)

    @property
    def whole(self) -> tuple[int, ...]:
        """Operators whose backward could leave something for later, but then takes too long."""
        return tuple(op for op, ratio in enumerate(self.apart) if ratio > MOST_APART)

    @property
    def tables(self) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
        """Sample counts, and operator times [num_ops, counts] forwards and backwards, corrected by stages timed in place."""
        return _tables(self)

    def update_per_byte(self) -> float | None:
        """The update's seconds for each byte: by stages timed in place, else `update_s_per_byte`."""
        found = update_s_per_byte(self.in_place)
        return self.update_s_per_byte if found is None else found

    def knows(self, ops: tuple[int, ...], samples: int) -> bool:
        """Whether a stage was timed in place."""
        return any(stage.ops == ops and stage.samples == samples for stage in self.in_place)

    def timed(self, stages: Iterable[StageTimes]) -> GraphProfile:
        """The profile with more stages timed in place; an older time of the same stage is replaced."""
        fresh = {(stage.ops, stage.samples): stage for stage in stages}
        kept = [stage for stage in self.in_place if (stage.ops, stage.samples) not in fresh]
        return replace(self, in_place=(*kept, *fresh.values()))

    def outdated(self, now_s: Sequence[float], others: float) -> bool:
        """Whether the profile is no longer true, and can be taken better now.

        Slower operators on a machine that is busier than then say nothing of the machine. Faster ones do wherever it is not busier,
        and slower ones where it is not busier either.

        Args:
            now_s: seconds of the operators of `spots`.
            others: share of the processors that other programs have now.
        """
        factors = [now / spot.seconds for now, spot in zip(now_s, self.spots, strict=True)]
        # Both have to have changed: a single one may have been disturbed.
        changed = bool(factors) and (min(factors) > CHANGED or max(factors) * CHANGED < 1.0)
        return changed and (others <= self.others - QUIETER or others <= QUIETER)

    @property
    def alone(self) -> GraphProfile:
        """The profile without stages timed in place: operators were timed alone."""
        return replace(self, in_place=(), messages=1.0)


@lru_cache(maxsize=16)
def _tables(profile: GraphProfile) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    shape = (len(profile.forward_s), len(profile.sample_counts))
    forward_s, backward_s = (np.array(rows, dtype=float).reshape(shape) for rows in (profile.forward_s, profile.backward_s))
    counts = tuple(sorted({*profile.sample_counts, *(stage.samples for stage in profile.in_place)}))
    if counts != profile.sample_counts:
        tables = (forward_s, backward_s)
        forward_s, backward_s = (
            np.stack([_interpolate(table, profile.sample_counts, count) for count in counts], axis=1) for table in tables
        )
    return counts, *corrected(forward_s, backward_s, counts, profile.in_place)


def _interpolate(table: np.ndarray, counts: tuple[int, ...], samples: int) -> np.ndarray:
    """[num_ops] times at a number of samples; see `GraphProfile.at`."""
    if samples >= counts[-1]:
        return table[:, -1] * (samples / counts[-1])
    high = int(np.searchsorted(counts, samples, side="right"))
    if high == 0:
        return table[:, 0].copy()
    share = (samples - counts[high - 1]) / (counts[high] - counts[high - 1])
    return table[:, high - 1] * (1 - share) + table[:, high] * share


@final
@settings("cost")
class Profiled(AbstractCostModel):
    """Times measured on the device at hand; `gpp.capture.kept_profile.measured` fills `profiles`.

    Args:
        cache_dir: where profiles are kept between runs.
        num_threads: CPU threads of one device, as the workers use.
        budget_s: seconds that measuring one graph may take, roughly.
        companions: busy devices beside the one measured; None for as many as the cluster has further cores of this machine.
        fallback: answers for devices and graphs that were not measured; None refuses instead.
        rehearsals: plans that may be timed in place before one is chosen, where the engine runs them here; 0 plans by
            operators that were timed alone.
        profiles: what was measured.
    """

    cache_dir: str
    num_threads: Count = 1
    budget_s: Positive = 4.0
    companions: Natural | None = None
    fallback: Analytical | None = None
    rehearsals: Natural = 3
    profiles: tuple[GraphProfile, ...] = ()

    def num_companions(self, cluster: Cluster) -> int:
        """Busy devices beside the one that is measured: they share the machine's caches, memory and power with it."""
        if cluster.devices[0].kind != "cpu":
            return 0
        if self.companions is not None:
            return self.companions
        return min(cluster.num_devices * self.num_threads, len(os.sched_getaffinity(0))) // self.num_threads - 1

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        profile = self.profile_of(graph, device)
        if profile is None:
            return self._fallback(device).op_times(graph, samples, device, degree)
        times, rate = profile.at(samples), graph.shares(degree) / device.speed_factor
        weight = times.weight_s if profile.weight_share else times.backward_s * graph.weight_share
        return OpTimes(forward_s=times.forward_s * rate, backward_s=times.backward_s * rate, weight_s=weight * rate)

    def whole_ops(self, graph: OpGraph, device: Device) -> tuple[int, ...]:
        profile = self.profile_of(graph, device)
        return profile.whole if profile else ()

    def update_s(self, num_bytes: float, device: Device) -> float:
        per_byte = [p.update_per_byte() for p in self.profiles if p.setting.device_kind == device.kind]
        if per_byte and per_byte[-1] is not None:
            return per_byte[-1] * num_bytes / device.speed_factor
        return self._fallback(device).update_s(num_bytes, device)

    def move_s(self, num_bytes: float, device: Device) -> float:
        per_byte = [p.move_s_per_byte for p in self.profiles if p.setting.device_kind == device.kind]
        if per_byte and per_byte[-1] is not None:
            return per_byte[-1] * num_bytes / device.speed_factor
        return self._fallback(device).move_s(num_bytes, device)

    def add(self, profile: GraphProfile) -> Profiled:
        """The cost model with one more profile, which replaces an older one of its graph and device."""
        key = (profile.graph_fingerprint, profile.setting.device_kind)
        kept = tuple(p for p in self.profiles if (p.graph_fingerprint, p.setting.device_kind) != key)
        return replace(self, profiles=(*kept, profile))

    def profile_of(self, graph: OpGraph, device: Device) -> GraphProfile | None:
        """The profile of a graph on devices of a kind."""
        found = (p for p in self.profiles if p.graph_fingerprint == graph.fingerprint and p.setting.device_kind == device.kind)
        return next(found, None)

    def load(self, graph: OpGraph, setting: Setting) -> GraphProfile | None:
        """The profile on disk, or None; a file that cannot be read counts as none."""
        return unseal(GraphProfile, self.path(graph, setting))

    def store(self, graph: OpGraph, profile: GraphProfile) -> Path:
        """Write a profile; readers see the old file or the new one, never half of it.

        Raises:
            InvalidConfig: the folder cannot be written to.
        """
        path = self.path(graph, profile.setting)
        seal(path, profile, "cost.cache_dir")
        return path

    def path(self, graph: OpGraph, setting: Setting) -> Path:
        """The path of the profile of a graph under a setting. The contents of both make its name."""
        # The word tells profiles that can be checked from those of earlier versions, which cannot.
        digest = hashlib.sha256(f"{to_json(setting)} checked".encode()).hexdigest()[:12]
        return Path(self.cache_dir).expanduser() / f"{graph.fingerprint}-{digest}.json"

    def _fallback(self, device: Device) -> Analytical:
        if self.fallback is None:
            raise InvalidConfig(
                "cost",
                "profiled",
                f"has no measurement of this graph on a {device.kind} device",
                "run it once with cost=profiled on a machine with such a device, or set cost=analytical",
            )
        return self.fallback


def cpu_setting(num_threads: int = 1, optimizer: str = "", companions: int = 0) -> Setting:
    """The setting of a measurement on this machine's CPU, found without torch."""
    return Setting(
        device_kind="cpu",
        device_name=cpu_name(),
        torch_version=version("torch"),
        num_threads=num_threads,
        optimizer=optimizer,
        companions=companions,
    )


@cache
def cpu_name() -> str:
    """The processor's model name, with its family and model number where the name alone is vague."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    numbers = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
    return " ".join([facts.get("model name", platform.machine()), *numbers])


def sample_counts(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, and `largest` itself."""
    counts = [1]
    while counts[-1] * 2 <= largest:
        counts.append(counts[-1] * 2)
    return tuple(sorted({*counts, largest}))
