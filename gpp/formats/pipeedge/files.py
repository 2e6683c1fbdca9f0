"""PipeEdge's files: models, types of devices, hosts, and the schedule.

    models.yml         model: {layers, mem_MB: [of each layer], parameters_in, parameters_out: [of each layer]}
    device_types.yml   type: {bw_Mbps, mem_MB, model_profiles: {model: [{batch_size, dtype, time_s: [of each layer]}]}}
    devices.yml        type: [hosts]
    schedule           - host: [first layer, last layer]          (counted from 1, in the order of the stages)

`parameters_in` and `parameters_out` are numbers (of the dtype) for one sample; a list of the latter that is shorter than the
layers is repeated. A MB is 10^6 bytes and a Mbit 10^6 bits, as PipeEdge's profiler writes them.

Source: README_Scheduler.md and README_Profiler.md of github.com/usc-isi/PipeEdge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, with_config

from gpp.errors import InvalidConfig, InvalidFile
from gpp.formats.draft import OPEN, Amount
from gpp.formats.pipeedge.yaml import read_yaml

MB = 1e6
"""Bytes of a MB, and bits of a Mbit."""

Layers = Annotated[int, Field(ge=0, le=100_000)]
Numbers = Annotated[int, Field(ge=0, le=10**15)]


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model of models.yml.

    Args:
        mem_mb: memory of each layer in MB.
        parameters_in, parameters_out: numbers for one sample into the first layer, and out of each.
    """

    layers: Layers
    mem_mb: Annotated[tuple[Amount, ...], Field(alias="mem_MB")]
    parameters_in: Numbers
    parameters_out: tuple[Numbers, ...]

    def moved(self) -> tuple[int, ...]:
        """Numbers for one sample into the first layer, and out of each: layers + 1 of them."""
        out = self.parameters_out
        return (self.parameters_in, *(out[i % len(out)] for i in range(self.layers)))


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of each layer of a model for a micro-batch of one size."""

    batch_size: Annotated[int, Field(ge=1)]
    dtype: str
    time_s: tuple[Amount, ...]


@with_config(OPEN)
@dataclass(frozen=True, slots=True, kw_only=True)
class TypeEntry:
    """A type of devices of device_types.yml."""

    bw_mbps: Annotated[Amount, Field(alias="bw_Mbps")]
    mem_mb: Annotated[Amount, Field(alias="mem_MB")]
    model_profiles: dict[str, tuple[LayerTimes, ...]] | None = field(default=None)


def read_model(path: str | Path, key: str) -> ModelEntry:
    """A model of models.yml, its lists of the right lengths.

    Raises:
        InvalidFile: the file is none, or a list has another length.
        InvalidConfig: `model.key` names no model of the file.
    """
    models = read_yaml(dict[str, ModelEntry], path, setting="model.path")
    if key not in models:
        fix = f"one of {', '.join(sorted(models)[:12])}" if models else "name a file with models"
        raise InvalidConfig("model.key", key, f"is no model of {path}", fix)
    entry = models[key]
    if not entry.layers:
        raise InvalidFile(path, f"{key}.layers", "must be at least 1", "describe the model's layers", [0], setting="model.path")
    if len(entry.mem_mb) != entry.layers:
        _refuse_length(path, f"{key}.mem_MB", len(entry.mem_mb), entry.layers, "model.path")
    if not 0 < len(entry.parameters_out) <= entry.layers:
        _refuse_length(path, f"{key}.parameters_out", len(entry.parameters_out), entry.layers, "model.path")
    return entry


def _refuse_length(path: str | Path, place: str, found: int, layers: int, setting: str) -> None:
    rule = f"has {found} entries for a model of {layers} layers"
    raise InvalidFile(path, place, rule, f"give {layers}, one for each layer", setting=setting)


def read_types(path: str | Path, *, setting: str) -> dict[str, TypeEntry]:
    """The types of device_types.yml.

    Raises:
        InvalidFile: the file is none.
    """
    return read_yaml(dict[str, TypeEntry], path, setting=setting)


def times_by_type(
    path: str | Path, key: str, layers: int, dtype: str, batch: int | None
) -> tuple[int, dict[str, tuple[float, ...]]]:
    """The micro-batch size, and for each type that has been timed with it the seconds of each layer.

    Args:
        batch: None for the only size that any type has been timed with.

    Raises:
        InvalidConfig: no type has a profile of that model, batch and dtype; names those that there are.
        InvalidFile: a list of times has another length than the model.
    """
    setting, theirs = "model.types", f"torch.{dtype}"
    profiles = {
        name: [times for times in (entry.model_profiles or {}).get(key, ()) if times.dtype == theirs]
        for name, entry in read_types(path, setting=setting).items()
    }
    sizes = sorted({times.batch_size for known in profiles.values() for times in known})
    if not sizes:
        rule = f"has no profile of {key} in {theirs}"
        raise InvalidFile(path, "", rule, "measure one (mode=profile), or set another dtype or model.key", setting=setting)
    listed = ", ".join(map(str, sizes))
    if batch is None and len(sizes) > 1:
        rule = f"must be one of the profiled sizes, {listed}"
        raise InvalidConfig("microbatch_size", None, rule, f"set microbatch_size={sizes[-1]}")
    batch = sizes[0] if batch is None else batch
    if batch not in sizes:
        rule = f"has no profile in {path} for {key} in {theirs}: it has {listed}"
        raise InvalidConfig("microbatch_size", batch, rule, f"set microbatch_size={sizes[-1]}, or measure one (mode=profile)")
    found: dict[str, tuple[float, ...]] = {}
    for name, known in profiles.items():
        for times in known:
            if times.batch_size == batch:
                if len(times.time_s) != layers:
                    _refuse_length(path, f"{name}.model_profiles.{key}: time_s", len(times.time_s), layers, setting)
                found[name] = times.time_s
    return batch, found


def read_hosts(path: str | Path, types: Mapping[str, TypeEntry], types_path: str | Path) -> dict[str, tuple[str, ...]]:
    """The hosts of each type that has any, in the file's order.

    Raises:
        InvalidFile: the file is none; it names a type that is not described, a host twice, or no host at all.
    """
    setting = "cluster.devices"
    listed = read_yaml(dict[str, tuple[str | int, ...] | None], path, setting=setting)
    hosts = {name: tuple(map(str, given)) for name, given in listed.items() if given}
    for name in hosts:
        if name not in types:
            rule = f"is no type of {types_path}, which has {', '.join(sorted(types)[:12]) or 'none'}"
            raise InvalidFile(path, name, rule, "correct the name in one of both files", setting=setting)
    every = [host for given in hosts.values() for host in given]
    if not every:
        raise InvalidFile(path, "", "names no host", "list a host below its type, as in `RCC-VE-C2000: [rcc-0]`", setting=setting)
    if twice := next((host for host in every if every.count(host) > 1), None):
        raise InvalidFile(path, "", f"names the host {twice} twice", "name each host once", setting=setting)
    return hosts


def schedule_text(stages: Iterable[tuple[str, int, int]]) -> str:
    """A schedule in PipeEdge's form.

    Args:
        stages: host, first and last layer of each stage, counted from 1.
    """
    # A key must read as text.
    named = [(host if _PLAIN.fullmatch(host) else json.dumps(host), first, last) for host, first, last in stages]
    return "".join(f"- {host}: [{first}, {last}]\n" for host, first, last in named)


_PLAIN = re.compile(r"[A-Za-z][\w.-]*")
