"""A module's tensors on disk and their size, for workers and for the caller of `gpp.train`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gpp.errors import CaptureError, InvalidFile
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


def save_final(run_dir: Path, stage: int, state: Mapping[str, torch.Tensor]) -> None:
    """Write a stage's tensors to checkpoints/final, if it has any."""
    folder = run_dir / "checkpoints" / "final"
    folder.mkdir(parents=True, exist_ok=True)
    if state:
        save_file({name: t.detach().cpu().contiguous() for name, t in state.items()}, folder / f"stage_{stage}.safetensors")


def load_final(run_dir: Path) -> dict[str, torch.Tensor]:
    """The tensors of all stages in checkpoints/final, by full name."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted((run_dir / "checkpoints" / "final").glob("stage_*.safetensors")):
        state.update(load_file(path))
    return state


class Slices(Mapping[str, torch.Tensor]):
    """A safetensors file as a mapping: only the tensors that are asked for are read."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = frozenset(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def part(self, name: str, dim: int, ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
        """Ranges [lo, hi) of one dimension of a tensor, one behind the other; nothing else is read."""
        file = self._file.get_slice(name)
        before = (slice(None),) * dim
        return torch.cat([file[(*before, slice(lo, hi))] for lo, hi in ranges], dim=dim)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


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
