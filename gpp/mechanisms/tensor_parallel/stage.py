"""How many devices share each replica of a stage, whose operators are split over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpp.errors import InvalidPlan
from gpp.settings import Count
from gpp.stage import AbstractStageValue, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel(AbstractStageValue):
    """Teams of devices, each of which runs one replica.

    Args:
        degree: devices of a team; 1 leaves every operator whole.
    """

    name: ClassVar[str] = "tensor_parallel"
    earlier: ClassVar[Mapping[str, str]] = {"tensor_parallel": "degree"}
    without: ClassVar[str] = "strategy.planner.tensor_parallel=false"
    degree: Count = 1

    @property
    def devices_per_replica(self) -> int:
        return self.degree

    def check(self, s: int, stage: Stage, stages: tuple[Stage, ...], *, backward: bool) -> None:
        if len(stage.devices) % self.degree:
            raise InvalidPlan(f"stage {s}: tensor_parallel={self.degree} must divide its {len(stage.devices)} devices")

    def check_pipeline(self, s: int, *, trains: bool) -> None:
        if not trains:
            raise InvalidPlan(
                f"stage {s} splits its operators over devices, which mode=inference does not. Fix: one device for each replica "
                f"({self.without})"
            )

    def words(self) -> str:
        return f"split in {self.degree}"


Value = TensorParallel
