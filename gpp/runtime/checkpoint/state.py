"""A module's tensors on disk, for workers and for the caller of `gpp.train`; weights of which a worker holds a share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from gpp.capture.cut import AbstractShards
from gpp.errors import CaptureError, InvalidFile
from gpp.graph.captured import LOSS
from gpp.models.losses import named_tensors
from gpp.runtime.job_fit import AGAIN


def copy_into(module: torch.nn.Module, state: Mapping[str, torch.Tensor], loss: torch.nn.Module | None = None) -> None:
    """Copy tensors into parameters and buffers by name; a tied weight has one of its names in `state`.

    Args:
        loss: the module of the loss, whose tensors are called `loss.NAME`.
    """
    with torch.no_grad():
        for name, tensor in named_tensors(module, loss, tied=True):
            if name in state:
                tensor.copy_(state[name])


def whole_state(module: torch.nn.Module, state: Mapping[str, torch.Tensor], loss: torch.nn.Module | None = None) -> dict[str, Any]:
    """What `module.state_dict()` has, with the values of `state`: tied weights by all of their names, and what no worker has.

    Args:
        state: tensors by name; a tied weight has one of its names there.
        loss: the module of the loss, whose tensors are called `loss.NAME`.
    """
    named = named_tensors(module, loss, tied=True)
    known = {id(tensor): state[name] for name, tensor in named if name in state}
    parts = [("", module)] if loss is None or loss in set(module.modules()) else [("", module), (f"{LOSS}.", loss)]
    own = {at + name: value for at, part in parts for name, value in part.state_dict(keep_vars=True).items()}
    values: dict[str, Any] = {}
    given: set[int] = set()
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            now, first = known.get(id(value), value), id(value) in known and id(value) not in given
            # One tensor under two names would be refused by `safetensors.torch.save_file`.
            values[name] = now if first else now.detach().clone()
            given.add(id(value))
        else:
            values[name] = value
    if known.keys() <= set(map(id, own.values())) | _passing(module):
        return values
    return values | dict(state)  # a hook of a state dict has made tensors of its own


def _passing(module: torch.nn.Module) -> set[int]:
    """`id` of the buffers that a state dict leaves out."""
    return {id(one._buffers[name]) for one in module.modules() for name in one._non_persistent_buffers_set}


class Slices(Mapping[str, torch.Tensor]):
    """Safetensors files as a mapping: only the tensors that are asked for are read.

    Args:
        shards: of a device of a replica; of the tensors that it splits, the device's share alone is there.
    """

    def __init__(self, *files: Any, shards: AbstractShards | None = None) -> None:
        self._files, self._split = files, shards.split if shards else {}
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # a file is no mapping

    def of(self, shards: AbstractShards) -> Slices:
        """The same for a device of a replica."""
        return Slices(*self._files, shards=shards)

    def __getitem__(self, name: str) -> torch.Tensor:
        if (part := self._split.get(name)) is None:
            return self._file_of[name].get_tensor(name)
        # Ranges [lo, hi) of one dimension, one behind the other; nothing else is read.
        slices, before = self._file_of[name].get_slice(name), (slice(None),) * part.dim
        return torch.cat([slices[(*before, slice(lo, hi))] for lo, hi in part.ranges], dim=part.dim)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._file_of))

    def __len__(self) -> int:
        return len(self._file_of)


@contextmanager
def job_weights(run_dir: Path) -> Iterator[Slices]:
    """The initial weights of a job in main memory, while a stage takes what it needs.

    Raises:
        InvalidFile: the file cannot be read, or its end is missing.
        CaptureError: its tensors are not those of the job's model.
    """
    path = run_dir / "job" / "weights.safetensors"
    try:
        with safe_open(path, framework="pt") as weights:
            yield Slices(weights)
    except (SafetensorError, OSError) as error:
        raise InvalidFile(path, "", f"is no whole file of weights ({error})", AGAIN) from None
    except CaptureError as error:
        raise CaptureError(f"{path} and model.json do not fit: {error}") from error


@final
class SplitWeights:
    """The weights of a worker that are shares, and the way to make them whole.

    Args:
        of_team: name of a weight of a stage whose replicas are several devices -> the worker's part of that stage, and whether its
            replica's weights are those that are saved.
    """

    def __init__(self, of_team: Mapping[str, tuple[AbstractShards, bool]]) -> None:
        self._of_team = of_team

    def split(self, name: str) -> bool:
        """Whether the worker holds a share only."""
        return name in self._of_team and name in self._of_team[name][0].split

    def counts(self, name: str) -> bool:
        """Whether the worker counts a weight among those of its replica: its own share, and as the first member what is whole."""
        return name not in self._of_team or self.split(name) or not self._of_team[name][0].member

    def helps(self, name: str) -> bool:
        """Whether the worker takes part in putting a weight together that is to be saved."""
        return self.split(name) and self._of_team[name][1]

    def whole(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """A weight, or a tensor that lies like it, put together; the same tensor where it is no share. All members call it."""
        return self._of_team[name][0].whole(name, share.detach()) if self.split(name) else share

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a split weight, put together."""
        return self._of_team[name][0].split[name].shape

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The worker's share of a weight, or of a tensor that lies like it."""
        return self._of_team[name][0].share(name, whole)
