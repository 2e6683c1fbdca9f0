from dataclasses import dataclass
from typing import ClassVar

from gpp.errors import InvalidPlan
from gpp.settings import Natural
from gpp.stage import AbstractStageValue, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum(AbstractStageValue):
    """The stage that adds up the gradients of all."""

    name: ClassVar[str] = "checksum"
    to: Natural

    @property
    def acts(self) -> bool:
        return True

    def check(self, s: int, stage: Stage, stages: tuple[Stage, ...], *, backward: bool) -> None:
        if self.to >= len(stages):
            raise InvalidPlan(f"stage {s}: checksum.to={self.to} must be one of {len(stages)} stages. Fix: to=0")

    def words(self) -> str:
        return f"checksum to s{self.to}"


Value = Checksum
