"""Samples as torch's tensors: from columns in memory, or from a map-style Dataset that gives them one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from gpp.data.base import TARGET, Samples, check_names
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel, TensorSpec


@final
class ColumnSamples(Samples):
    """Columns [num_samples, ...] by name, each made when first asked for.

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


@final
class DatasetSamples(Samples):
    """The items of a Dataset under a model's names, in the dtypes of its specs.

    Args:
        dataset: has `__len__` and `__getitem__`; see `gpp.data.imported.ImportedData` for its items.
        model: the model that the items are for.
        dtype: type of floats, as `float32`.
        rows: positions in the dataset of the samples to give, in this order.
    """

    in_memory: ClassVar[bool] = False

    def __init__(self, dataset: Any, model: AbstractModel, dtype: str, rows: Sequence[int]) -> None:
        self._dataset, self._rows = dataset, rows
        self._inputs, self._targets = model.inputs(), model.targets()
        self._specs = self._inputs | {TARGET + name: spec for name, spec in self._targets.items()}
        self._dtypes = {"float": getattr(torch, dtype), "int": torch.int64, "bool": torch.bool}

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: Sequence[int] | Tensor, names: Collection[str] | None = None) -> dict[str, Tensor]:
        asked = check_names(names, self._specs)
        items = [self._named(self._dataset[self._rows[int(index)]]) for index in indices]
        return {name: self._tensor(name, self._specs[name], [item[name] for item in items]) for name in asked}

    def _tensor(self, name: str, spec: TensorSpec, values: list[Any]) -> Tensor:
        column = default_collate(values).to(self._dtypes[spec.dtype])
        if tuple(column.shape[1:]) != spec.shape:
            rule = f"has shape {list(column.shape[1:])} in the data set, {list(spec.shape)} in the model"
            raise InvalidConfig("data", name, rule, "transform the items, or correct the model's specs")
        return column

    def _named(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            named = {name: item[name] for name in self._inputs if name in item}
            for name in self._targets:
                if TARGET + name in item or name in item:
                    named[TARGET + name] = item[TARGET + name] if TARGET + name in item else item[name]
        elif isinstance(item, (tuple, list)) and len(item) == 2:
            inputs, targets = by_name(item[0], self._inputs), by_name(item[1], self._targets)
            named = inputs | {TARGET + name: value for name, value in targets.items()}
        else:
            raise InvalidConfig("data.factory", type(item).__name__, "items must be a dict or (inputs, targets)", "return one")
        missing = [name for name in self._specs if name not in named]
        if missing:
            raise InvalidConfig("data.factory", missing, "the model asks for these and the items lack them", "name them alike")
        return named


def by_name(value: Any, names: Collection[str]) -> dict[str, Any]:
    """One half of an item by the model's names: a dict as it is, a tuple in order, a value under the only name."""
    if isinstance(value, Mapping):
        return dict(value)
    if len(names) == 1 and not (isinstance(value, (tuple, list)) and len(value) == 1):
        return {next(iter(names)): value}
    if isinstance(value, (tuple, list)) and len(value) == len(names):
        return dict(zip(names, value, strict=True))
    raise InvalidConfig("data.factory", type(value).__name__, f"half of an item must give {', '.join(names)}", "use a dict by name")
