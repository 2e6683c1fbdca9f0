"""Samples that the caller holds in memory, handed to the workers as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from gpp.data.base import AbstractData, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.files import write_tensors
from gpp.models.base import AbstractModel
from gpp.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@final
@settings("data")
class Tensors(AbstractData):
    """`FOLDER/train.safetensors` and `FOLDER/test.safetensors`, one tensor [num_samples, ...] per name."""

    folder: str

    def check(self, model: AbstractModel) -> None:
        pass  # the names were taken from the tensors themselves

    def load(self, split: str, model: AbstractModel | None, *, seed: int, dtype: str) -> Samples:
        from safetensors.numpy import load_file

        from gpp.data.samples import ColumnSamples

        check_split(split)
        path = Path(self.folder) / f"{split}.safetensors"
        columns = load_file(path) if path.exists() else {}
        count = len(next(iter(columns.values()))) if columns else 0
        return ColumnSamples(count, {name: (lambda column=column: column) for name, column in columns.items()}, dtype)


def write(folder: Path, split: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one split; the names are those of the inputs, and `target:NAME`.

    Raises:
        InvalidConfig: the tensors differ in their number of samples.
    """
    counts = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1:
        raise InvalidConfig(
            f"data ({split})", counts, "all tensors must hold the same number of samples", "give one row per sample"
        )
    write_tensors(folder / f"{split}.safetensors", {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
