"""The policies that mark operators: those that are computed again, and those whose activations are on the host meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from gpp.cost.problem import Problem
from gpp.cost.stage import StageCost
from gpp.mechanisms.marks.bill import repeatable_ops
from gpp.mechanisms.marks.priced import Priced, Selection
from gpp.mechanisms.marks.stage import marked
from gpp.memory import AbstractMemory, Question, Spared
from gpp.settings import settings

if TYPE_CHECKING:
    from gpp.mechanisms.marks.choices import Judged


class AbstractMarking(AbstractMemory):
    """A policy whose ways are marks."""

    selection: Any
    """How marks are chosen: a `Selection`, or `all` operators of the stage."""

    def marks(self, asked: Question) -> Judged | None:
        """The marks with which a stage fits; None if it does with none."""
        from gpp.mechanisms.marks.fit import fit

        if self.selection == "all":
            return _all(asked)
        problem, stage, held, limit, depth, _, within = asked
        again = repeatable(asked)
        return fit(problem, stage, held, limit, ways=self.ways, selection=self.selection, depth=depth, again=again, within=within)

    @final
    def fit(self, asked: Question) -> Spared | None:
        found = self.marks(asked)
        return None if found is None else Spared(found.marking.on(asked.stage), found.added_s)

    @final
    def views(self, problem: Problem, *, same: bool) -> Iterator[Problem]:
        return Priced(problem, self.ways, again=same).views()


@final
@settings("strategy.memory")
class Recompute(AbstractMarking):
    """Operators are computed again where a stage lacks memory.

    Args:
        selection: which: `least`, those that cost least time (`fit` beside this); `capuchin`, the published greedy; `all` of the
            stage, as PipeDream-2BW and GPipe have it.
    """

    name: ClassVar[str] = "recompute"
    ways: ClassVar[Collection[str]] = ("recompute",)
    selection: Selection | Literal["all"] = "least"


@final
@settings("strategy.memory")
class Offload(AbstractMarking):
    """What operators make goes to the host and comes back where a stage lacks memory."""

    name: ClassVar[str] = "offload"
    ways: ClassVar[Collection[str]] = ("offload",)
    selection: Selection = "least"


@final
@settings("strategy.memory")
class Auto(AbstractMarking):
    """Either, whichever costs less time; or fewer micro-batches in flight, where that does."""

    name: ClassVar[str] = "auto"
    ways: ClassVar[Collection[str]] = ("recompute", "offload")
    holds_fewer: ClassVar[bool] = True
    selection: Selection = "least"


def _all(asked: Question) -> Judged | None:
    from gpp.mechanisms.marks.choices import Judged, Marking

    again = repeatable(asked)
    kept, bill = (StageCost.of(asked.problem, marked(asked.stage.keeping, recompute=ops), asked.depth) for ops in ((), again))
    peak = bill.memory.peak(asked.held)
    return Judged(bill.backward_s - kept.backward_s, peak, Marking(again)) if peak <= asked.limit_bytes else None


def repeatable(asked: Question) -> tuple[int, ...]:
    """Operators of a stage that may be computed again."""
    return repeatable_ops(asked.problem, asked.stage.ops, asked.position)
