"""A model of which only a profile is known: it is planned and simulated, never run."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpp.cost.models.base import AbstractCostModel
from gpp.cost.models.constant import Constant
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.models.base import AbstractPlanned
from gpp.models.dotted import source_hash
from gpp.serialization import read_text
from gpp.settings import Positive, settings

SAMPLE = "one sample is one micro-batch of the profile, so minibatch_size counts the profile's micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractProfile(AbstractPlanned):
    """A model that brings its own times, whatever `cost` says.

    Args:
        coarsen: whether to group the operators into `graph.max_ops`; false plans with the profile's own.
    """

    coarsen: bool = False

    @property
    @abstractmethod
    def times(self) -> AbstractCostModel:
        """The cost model that gives the profile's times."""

    def untrained(self) -> InvalidConfig:
        rule = "is a profile, which can be planned and simulated but has no network to train"
        return InvalidConfig("model", self.name, rule, "set mode=plan, engine=simulate or engine=emulate")


@final
@settings("model")
class Profile(AbstractProfile):
    """PipeDream's graph.txt, Piper's JSON or plain JSON; see `gpp.formats.profiles`.

    One sample is one micro-batch of the profile, so `minibatch_size` is the number of profiled micro-batches between
    two optimizer steps. Times are the profile's, whatever `cost` says.

    Args:
        name: the model's name; `profile` stands for the file's name, up to its first dot.
        path: path of the file.
        coarsen: whether to group the operators into `graph.max_ops`; false plans with the profile's own. Grouped
            operators lose their declarations (operators split over devices, or recomputed).
        seconds: length of one unit of the times in Piper's JSON; its ResNet and GNMT files are in milliseconds: 0.001.
    """

    path: str
    seconds: Positive = 1.0

    def __post_init__(self) -> None:
        from gpp.formats.draft import SETTING

        read_text(self.path, setting=SETTING)
        if self.name == "profile":
            object.__setattr__(self, "name", Path(self.path).name.partition(".")[0] or self.name)

    @property
    def times(self) -> Constant:
        return Constant()

    def captured(self) -> Captured:
        from gpp.formats.profiles import read_profile

        graph = read_profile(self.path, seconds=self.seconds)
        return Captured(name=self.name, nodes=(), inputs=(), results={}, graph=graph, warnings=(SAMPLE,))

    def source(self) -> str:
        return source_hash([Path(self.path)])
