"""Samples held in memory, one array per name, each made when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gpp.data.base import Samples, check_names


@final
class ColumnSamples(Samples):
    """Columns [num_samples, ...] by name.

    A rank that asks for two of ten names pays for two.

    Args:
        num_samples: rows of every column.
        columns: name -> the function that makes the column.
        dtype: type of floats, as `float32`.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, num_samples: int, columns: Mapping[str, Callable[[], np.ndarray]], dtype: str) -> None:
        self._num_samples = num_samples
        self._columns = columns
        self._dtype = getattr(torch, dtype)
        self._made: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: Sequence[int] | Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        # An eighth of the time that indexing takes, which reads from any number of dimensions at a time.
        return {name: self._column(name).index_select(0, rows) for name in check_names(names, self._columns)}

    def _column(self, name: str) -> Tensor:
        if name not in self._made:
            column = torch.from_numpy(self._columns[name]())
            self._made[name] = column.to(self._dtype) if column.is_floating_point() else column
        return self._made[name]
