"""A model of PipeEdge's files: its layers, their memory and messages, and the seconds of each on every type of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, final

import numpy as np

from gpp.cost.models.by_type import TimesByType
from gpp.errors import InvalidConfig
from gpp.formats.pipeedge.files import read_model, times_by_type
from gpp.formats.pipeedge.graph import chain_graph, layer_name
from gpp.graph.captured import Captured
from gpp.models.dotted import source_hash
from gpp.models.profile import AbstractProfile
from gpp.settings import Count, arguments, settings

Dtype = Literal["float32", "float64", "bfloat16"]


@final
@settings("model")
class PipeEdge(AbstractProfile):
    """A model of models.yml with the times of device_types.yml; see `gpp.formats.pipeedge.files`.

    Args:
        name: the model's name; `pipeedge` stands for the last part of the key.
        path: path of models.yml.
        entry: the model's name there.
        types: path of device_types.yml.
        batch: samples of a micro-batch; None for the only size that has been timed.
        dtype: that of the times and of the messages.
    """

    path: str
    entry: str
    types: str | None = None
    batch: Count | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if self.types is None:
            raise InvalidConfig("model.types", None, "the times are in device_types.yml", "set model.types=device_types.yml")
        if self.name == "pipeedge":
            object.__setattr__(self, "name", self.entry.rpartition("/")[2] or self.name)
        self._read()

    def _read(self) -> tuple[Captured, TimesByType]:
        """The graph and the times; all of both files is checked.

        Raises:
            InvalidConfig, InvalidFile: as `read_model` and `times_by_type`.
        """
        assert self.types is not None
        entry = read_model(self.path, self.entry)
        batch, found = times_by_type(self.types, self.entry, entry.layers, self.dtype, self.batch)
        typical = tuple(float(seconds) for seconds in np.mean([*found.values()], axis=0) / batch)
        names = [layer_name(layer) for layer in range(1, entry.layers + 1)]
        seconds = {kind: dict(zip(names, times, strict=True)) for kind, times in found.items()}
        graph = chain_graph(self.name, entry, typical, self.dtype)
        captured = Captured(name=self.name, nodes=(), inputs=(), results={}, graph=graph, batch=batch)
        return captured, TimesByType(batch=batch, seconds=seconds, source=Path(self.types).name)

    @property
    def times(self) -> TimesByType:
        return self._read()[1]

    def captured(self) -> Captured:
        return self._read()[0]

    def source(self) -> str:
        return source_hash([Path(self.path), Path(self.types or "")])


@arguments("model")
def from_files(
    *,
    name: str,
    path: str,
    key: str,
    types: str | None = None,
    batch: Count | None = None,
    dtype: Dtype = "float32",
    loss: str = "none",
    coarsen: bool = False,
) -> PipeEdge:
    """A `PipeEdge` by the words of the command line, where `model.key` names the model in models.yml.

    Args:
        name, path, types, batch, dtype, coarsen: as in `PipeEdge`.
        loss: of no meaning here.
    """
    return PipeEdge(name=name, loss=loss, path=path, entry=key, types=types, batch=batch, dtype=dtype, coarsen=coarsen)
