"""What a planner promises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar, final

from gpp.cost.problem import Problem
from gpp.errors import GppError, InvalidConfig, InvalidPlan
from gpp.memory import AbstractMemory
from gpp.plan.plan import Plan
from gpp.settings import file_word
from gpp.timeline import Timeline

Predict = Callable[[Plan], Timeline]
"""The simulated timeline of a plan under the schedule that will run it."""


@final
@dataclass(frozen=True, slots=True)
class PlainPrediction:
    """The prediction of plans as a planner makes them, with plain passes of which a stage runs one backward and one forward by
    turns: of a plan of equal micro-batches it is what `gpp.planners.search` says, which a search then need not ask for. Whoever
    predicts something else than the plan, as a mechanism that searches does, has another function.

    Args:
        can_run: whether the engine can run a plan; of one that it cannot run the prediction is endless.
    """

    predict: Predict
    can_run: Callable[[Plan], bool] = lambda plan: True

    def __call__(self, plan: Plan) -> Timeline:
        return self.predict(plan)


PLANNED_AHEAD = 4
"""Mini-batches for each device that planners see as one, where the pipeline does not drain: filling it then hardly counts."""


def continuous(problem: Problem, *, knows_versions: bool) -> list[Problem]:
    """What planners are asked where the pipeline does not drain, one after the other until a plan fits.

    To a planner it is a pipeline with a very large mini-batch. How many versions of the weights a stage will hold depends on its
    position, which the planner does not know: few are assumed first, and more if what comes out does not fit.

    Args:
        knows_versions: whether the planner knows them after all (`AbstractPlanner.knows_versions`), so that none are assumed.
    """
    weights, devices = problem.regime.weights, problem.cluster.num_devices
    most, copies = weights.most_copies(devices), [1]
    while not knows_versions and copies[-1] < most:
        copies.append(min(2 * copies[-1], most))
    return [
        replace(
            problem,
            minibatch_size=problem.minibatch_size * PLANNED_AHEAD * devices,
            microbatch_size=problem.microbatch_size or weights.microbatch_size(problem.minibatch_size),
            regime=replace(problem.regime, minibatches=PLANNED_AHEAD * devices, assumed_copies=count),
        )
        for count in copies
    ]


class AbstractPlanner(ABC):
    """Cuts a graph into stages and deals out the devices. Settings are the fields of the dataclass."""

    mechanisms: ClassVar[tuple[str, ...]] = ()
    """The names of the mechanisms whose values its stages may have (`gpp.mechanism`)."""
    keeps: ClassVar[bool] = False
    """Whether its stages keep what they make, so that no memory policy is for them."""
    proves: ClassVar[bool] = False
    """Whether the planner proves how far its plan's time is from that of any other plan."""
    marks: ClassVar[bool] = False
    """Whether the planner itself, and no memory policy, decides which operators are computed again or go to the host."""
    fills: ClassVar[bool] = False
    """Whether the planner makes a stage for every device, so that there must be an operator for each."""

    @property
    def name(self) -> str:
        """The word that chooses it (`strategy/planner=even`): the name of its file, unless it says another."""
        return file_word(self)

    @property
    def fits_by(self) -> AbstractMemory | None:
        """The policy by which a planner that marks operators itself makes a stage fit; None if the strategy chooses one."""
        return None

    @property
    def varies_k(self) -> bool:
        """Whether stages may run several passes of one direction in a row (k of kFkB)."""
        return False

    @property
    def fitting(self) -> AbstractPlanner:
        """The planner that says soonest whether this one has a plan; another one where it is time that is searched long for."""
        return self

    def knows_versions(self, problem: Problem) -> bool:
        """Whether the planner bills each stage's versions of the weights by its position, so that none have to be assumed."""
        return self.marks

    @abstractmethod
    def plan(self, problem: Problem, predict: Predict) -> Plan:
        """The plan with the best predicted iteration time that the planner finds.

        Args:
            problem: graph, cluster, cost model, batch.
            predict: scores a candidate; only `metrics.iteration_s` is read. It is infinite for a plan that does not fit the memory,
                or that the engine cannot run (`Problem.refuses`); such a plan does not count as a simulation in vain.

        Returns:
            A valid plan: it passes `Plan.validate(problem)`. It may leave devices idle.

        Raises:
            Infeasible: no plan in this planner's space fits the memory; names the tightest constraint.
            InvalidConfig: the problem is not for this planner.

        >>> strategy.planner.plan(problem, predict).planner
        'even'
        """


P = TypeVar("P", bound=AbstractPlanner, contravariant=True)


class AbstractReleased(ABC, Generic[P]):
    """A planner as its authors released it, formulas and traps included: it plans where a planner's `compatible` is true."""

    @abstractmethod
    def plan(self, planner: P, problem: Problem, predict: Predict) -> Plan:
        """The released planner's plan, valid for the problem, as `AbstractPlanner.plan`.

        Args:
            planner: whose settings it follows.
        """


def made_by(planner: AbstractPlanner, problem: Problem, predict: Predict) -> Plan:
    """What a planner returns, which may be one of the user's own.

    Raises:
        InvalidPlan: it is no plan.
    """
    found = planner.plan(problem, predict)
    if not isinstance(found, Plan):
        rule = "a planner returns a plan (gpp.plan.build.make_plan makes one), or raises Infeasible"
        raise InvalidPlan(f"{type(planner).__name__}.plan returned {found!r}: {rule}")
    return found


class AbstractSearch(ABC):
    """What a mechanism adds to the search of a planner that knows its name."""

    @abstractmethod
    def plan(self, planner: AbstractPlanner, problem: Problem, predict: Predict) -> Plan:
        """The best of a planner's plans as they are, and with the mechanism's values.

        Raises:
            Infeasible: none fits.
        """


def check_released(compatible: bool, released: AbstractReleased | None) -> None:
    """Refuse `compatible` without the planner that was released.

    Raises:
        InvalidConfig: it is missing.
    """
    if compatible and released is None:
        rule = "asks the released planner, and strategy.planner.released is none"
        raise InvalidConfig("strategy.planner.compatible", True, rule, "leave it out, or give strategy.planner.released")


@final
class Fits(Exception):
    """The end of a search in which any candidate that fits will do: one fits."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.plan = plan


@final
@dataclass(slots=True)
class JudgedCandidates:
    """The findings of a search about its candidates.

    Args:
        first: whether the first candidate that fits is the answer, whatever its time.
        refused: the reasons why the engine cannot run some candidates.
        ideal_s: the shortest step of any candidate if memory were endless.
    """

    first: bool = False
    refused: list[str] = field(default_factory=list)
    ideal_s: float = math.inf

    def fits(self, plan: Plan, predicted: Timeline) -> None:
        """Note a candidate that fits and can run.

        Raises:
            Fits: it will do.
        """
        if self.first:
            raise Fits(plan)
        self.note(predicted)

    def can_run(self, reason: str | None) -> bool:
        """Whether there is no reason why the engine cannot run a candidate; a reason is kept."""
        if reason is not None:
            self.refused.append(reason)
        return reason is None

    @staticmethod
    def passes(check: Callable[[], None]) -> bool:
        """Whether a check of a candidate raises nothing."""
        try:
            check()
        except GppError:
            return False
        return True

    def note(self, predicted: Timeline) -> None:
        self.ideal_s = min(self.ideal_s, predicted.metrics.iteration_s)
