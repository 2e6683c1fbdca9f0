"""Initial weights that no process has whole: every worker makes those of its stages, or reads them from files.

RUN_DIR/job/origin.json          the recipe, and which tensor of which file is which weight
            weights.safetensors  what the recipe is given: the bytes of a storage as `storage.N`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

import torch
from safetensors import SafetensorError, safe_open

from gpp.capture.cut import AbstractShards
from gpp.capture.recipe.made import made
from gpp.capture.recipe.value import Recipe
from gpp.capture.stage import StageModule
from gpp.errors import InvalidFile
from gpp.files import write_tensors
from gpp.runtime.job_fit import AGAIN
from gpp.serialization import read_json, write_value

FILE = "origin.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where initial weights come from.

    Args:
        recipe: makes every tensor that no file has.
        files: absolute path -> full name of a weight -> its name in the file.
    """

    recipe: Recipe
    files: dict[str, dict[str, str]] = field(default_factory=dict)


class ToMake(NamedTuple):
    """Initial weights that are still to be made, and the bytes of the storages that the recipe is given, by number."""

    origin: Origin
    given: Mapping[int, torch.Tensor]

    def save(self, folder: Path) -> None:
        """Write them into the folder of a job."""
        write_tensors(folder / "weights.safetensors", {f"storage.{number}": data for number, data in self.given.items()})
        write_value(folder / FILE, self.origin)


def origin_of(run_dir: Path) -> Origin | None:
    """Where the workers of a job have their initial weights from; None where the job has them whole.

    Raises:
        InvalidFile: the file is damaged.
    """
    path = run_dir / "job" / FILE
    return read_json(Origin, path, fix=AGAIN) if path.exists() else None


def fill(
    modules: Mapping[int, StageModule],
    shards: Mapping[int, AbstractShards],
    origin: Origin,
    given: Mapping[str, torch.Tensor],
    known: Mapping[str, torch.Tensor],
) -> None:
    """Give the stages of a worker their weights, one after the other: no more than one is in memory beside the stages' own.

    Args:
        shards: the worker's part of a stage whose replicas are several devices.
        given: the job's file.
        known: weights that are there already.

    Raises:
        InvalidFile: a file of weights cannot be read.
        CaptureError: the weights are not those of the job's model.
    """
    takers: dict[str, list[tuple[StageModule, AbstractShards | None]]] = defaultdict(list)
    for s, module in modules.items():
        for name in module.wants():
            if name in known:
                module.take(name, known[name])
            else:
                takers[name].append((module, shards.get(s)))

    def take(name: str, tensor: torch.Tensor) -> None:
        for module, part in takers[name]:
            module.take(name, part.share(name, tensor) if part and name in part.split else tensor)

    lacking = set(takers)
    for path, names in origin.files.items():
        own = sorted(lacking & names.keys())
        for name, tensor in _read(path, [names[name] for name in own], own):
            take(name, tensor)
        lacking -= set(own)
    for name, tensor in made(origin.recipe, lacking, lambda number: given[f"storage.{number}"]):
        take(name, tensor)


def _read(path: str, stored: Sequence[str], names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    if not stored:
        return
    try:
        with safe_open(path, framework="pt") as file:
            for name, own in zip(names, stored, strict=True):
                yield name, file.get_tensor(own)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(
            path, "", f"cannot be read any more ({error})", "put the file back, or name another by load_weights"
        ) from None
