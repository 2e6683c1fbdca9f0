"""A cost model of your own, in one file: seconds of some operators from a JSON file, and another cost model for all else.

    {"left.0.0": {"forward_s": 1e-4, "backward_s": 2e-4}}

Operators have the names that RUN_DIR/job/graph.json gives them; seconds are those of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from gpp.cluster import Device
from gpp.cost.models.base import AbstractDerived, OpTimes
from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.serialization import read_json
from gpp.settings import NotNegative, settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSeconds:
    """Seconds that an operator takes for one sample."""

    forward_s: NotNegative
    backward_s: NotNegative


@final
@settings("cost", slots=False)
class ListedSeconds(AbstractDerived):
    """Times of a file, in proportion to samples; `cost`, the other cost model, has all other times.

    Args:
        path: the file.
    """

    path: str

    def __post_init__(self) -> None:
        _ = self.table  # a wrong file is refused at once

    @cached_property
    def table(self) -> dict[str, SampleSeconds]:
        return read_json(dict[str, SampleSeconds], self.path, setting="cost.path")

    def op_times(self, graph: OpGraph, samples: int, device: Device, degree: int = 1) -> OpTimes:
        if unknown := sorted(set(self.table) - {op.name for op in graph.ops}):
            rule = f"has times of {unknown[0]}, and the model has no operator of this name"
            raise InvalidConfig("cost.path", self.path, rule, f"its operators are {', '.join(op.name for op in graph.ops)}")
        others = self.cost.op_times(graph, samples, device, degree)
        known = np.array([op.name in self.table for op in graph.ops])
        own = [self.table.get(op.name, SampleSeconds(forward_s=0.0, backward_s=0.0)) for op in graph.ops]
        many = samples * graph.shares(degree) / device.speed_factor
        forward = np.where(known, np.array([each.forward_s for each in own]) * many, others.forward_s)
        backward = np.where(known, np.array([each.backward_s for each in own]) * many, others.backward_s)
        weight = np.where(known, backward * graph.weight_share, others.weight_s)
        return OpTimes(forward_s=forward, backward_s=backward, weight_s=weight)
