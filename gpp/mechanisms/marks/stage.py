"""What of a stage is not held on its devices from forward to backward: computed again, or on the host meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpp.errors import InvalidPlan
from gpp.settings import Natural
from gpp.stage import AbstractStageValue, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks(AbstractStageValue):
    """How the operators of a stage that are not kept are treated.

    Args:
        recompute: operators of which nothing is held from forward to backward, ascending: what they make is computed again when
            the backward needs it.
        boundaries: those of `recompute` that hold what they hand to other operators all the same, ascending: a run of operators
            that are computed again together ends there.
        offload: operators whose activations are on the host meanwhile, ascending; none of `recompute`.
    """

    name: ClassVar[str] = "marks"
    spares: ClassVar[bool] = True
    earlier: ClassVar[Mapping[str, str]] = {field: field for field in ("recompute", "boundaries", "offload")}
    recompute: tuple[Natural, ...] = ()
    boundaries: tuple[Natural, ...] = ()
    offload: tuple[Natural, ...] = ()

    @property
    def acts(self) -> bool:
        return bool(self.offload)

    @property
    def lacking(self) -> tuple[str, str]:
        return "recomputation" if self.recompute else "operators on the host", "plan without it (strategy/memory=keep)"

    def within(self, ops: tuple[int, ...]) -> Marks | None:
        named = (self.recompute, self.boundaries, self.offload)
        recompute, boundaries, offload = (tuple(op for op in marked if op in ops) for marked in named)
        return Marks(recompute=recompute, boundaries=boundaries, offload=offload) if recompute or offload else None

    def check(self, s: int, stage: Stage, stages: tuple[Stage, ...], *, backward: bool) -> None:
        for field, ops in (("recompute", self.recompute), ("boundaries", self.boundaries), ("offload", self.offload)):
            if list(ops) != sorted(set(ops)):
                raise InvalidPlan(f"stage {s}: operators must ascend, got {field}={list(ops[:8])}")
        if others := sorted(set(self.recompute) - set(stage.ops)):
            raise InvalidPlan(f"stage {s}: recompute={others[:8]} names operators that are not its own")
        if foreign := sorted(set(self.offload) - set(stage.ops)):
            raise InvalidPlan(f"stage {s} can keep its own operators on the host only, not {foreign[:8]}")
        if kept := sorted(set(self.boundaries) - set(self.recompute)):
            raise InvalidPlan(
                f"stage {s}: operators {kept[:8]} are in boundaries, which says that of what is computed again their outputs stay, "
                "but not in recompute. Fix: take them out of boundaries"
            )
        if both := sorted(set(self.recompute) & set(self.offload)):
            raise InvalidPlan(
                f"stage {s}: operators {both[:8]} are in recompute and in offload; each is kept in one way. Fix: take them out "
                "of one of the two"
            )
        if (self.recompute or self.offload) and not backward:
            raise InvalidPlan(
                f"stage {s} has no backward pass, so it keeps nothing: recompute={list(self.recompute[:8])} and "
                f"offload={list(self.offload[:8])} must be empty. Fix: leave them out"
            )

    def check_pipeline(self, s: int, *, trains: bool) -> None:
        if not trains:
            raise InvalidPlan(
                f"stage {s} recomputes operators, or keeps them on the host, for a backward, and mode=inference has none. "
                "Fix: plan with mode=inference, or leave recompute and offload out of the plan"
            )

    def words(self) -> str:
        words = [f"{len(self.recompute)} recomputed"] if self.recompute else []
        return ", ".join([*words, *([f"{len(self.offload)} on host"] if self.offload else [])])


Value = Marks


def marks_of(stage: Stage) -> Marks:
    """The marks of a stage; without operators where everything is kept."""
    return stage[Marks] or Marks()


def marked(stage: Stage, **fields: Any) -> Stage:
    """The stage with other operators in some fields of its marks; a stage that keeps everything has none.

    >>> stage = Stage(ops=(0, 1), devices=(0,), microbatch_size=1, in_flight=1)
    >>> marked(stage, recompute=(1,)).mechanisms
    (Marks(recompute=(1,), boundaries=(), offload=()),)
    >>> marked(marked(stage, recompute=(1,)), recompute=()) == stage
    True
    """
    marks = replace(marks_of(stage), **fields)
    return stage.having(marks) if marks.recompute or marks.offload or marks.boundaries else stage.without(Marks)
