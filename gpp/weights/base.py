"""The promise of a weight policy: the version of the weights behind every pass, and the copies that it costs.

Version v of a stage's weights is what it holds after v updates. A pipeline that drains between two mini-batches has one version
at a time. One that does not computes the forward of a micro-batch several updates before the gradient of it is applied;
policies differ in what they do about that. Micro-batches and updates are counted from the start of the run, by each stage; where
replicas take micro-batches in turn, by each replica, which counts its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

from gpp.errors import InvalidConfig
from gpp.settings import file_word
from gpp.weights.corrections.base import AbstractCorrection
from gpp.weights.work import ADD, COPY, NONE, WeightWork

Backward = Literal["same", "current", "predicted"]
"""Those that the forward used; the latest; others, extrapolated for the backward."""


Source = tuple[int, int]
"""A version, and the updates by which it is extrapolated: passes of one source use the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePosition:
    """The place of a stage in a pipeline that does not drain.

    Args:
        warmup: micro-batches whose forwards are ahead of a backward: stages on the longest path after this one, for equal
            micro-batches (W(k) = D - 1 - k in a chain).
        depth: stages on the longest path of the plan (D); where replicas take turns, the stage's micro-batches that are in flight
            where the pipeline begins.
        accumulation: the stage's micro-batches between two updates (m).
    """

    warmup: int
    depth: int
    accumulation: int = 1

    @property
    def stages_before(self) -> int:
        """Stages before this one, seen from the sink (k); on a branch shorter than the longest one, as if it were that long."""
        return max(self.depth - 1 - self.warmup, 0)

    def batch(self, microbatch: int) -> int:
        """The mini-batch of a micro-batch: the number of the update that applies its gradient."""
        return microbatch // self.accumulation

    def latest(self, microbatch: int, start: int = 0) -> int:
        """Updates that the stage has made when it begins the forward of `microbatch`.

        Args:
            start: updates made when the pipeline was last empty.
        """
        return max(start, (microbatch - self.warmup) // self.accumulation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """How weights are extrapolated with the optimizer's state, beyond the rule of the optimizer itself.

    Args:
        future: gradients to come: `same`: steps go on as the last one did; `zero`: momentum decays without new gradients.
        decay: whether decoupled weight decay is part of the prediction; coupled decay (L2), a part of every gradient, always is.
        nesterov: whether SGD's steps go on along u v + g, momentum u times its buffer plus the last gradient, instead of v.
    """

    future: str = "same"
    decay: bool = False
    nesterov: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """The cost of predictions by an optimizer's rule.

    Args:
        once: work of every prediction.
        each: work of it for each update that it looks ahead.
        kept: bytes kept beside the optimizer's own state, for each byte of the weights.
        update: work at every update to keep them.
    """

    once: WeightWork = ADD
    each: WeightWork = NONE
    kept: float = 0.0
    update: WeightWork = NONE

    def of(self, horizon: int) -> WeightWork:
        """One prediction of so many updates."""
        return self.once + self.each * horizon


ALONG_THE_DRIFT = Extrapolation(kept=1.0, update=WeightWork(10.0, 4))
"""Along a running mean of past updates: at each the weights before it are copied, their change is made and taken into the mean."""


def along_a_momentum(rule: Predictor) -> Extrapolation:
    """The cost under an optimizer that keeps its last direction: this and the weights are read, the prediction is written."""
    return Extrapolation()


class Traffic(NamedTuple):
    """Work around a forward, a backward and an update: means over a mini-batch of the steady state."""

    forward: WeightWork = NONE
    backward: WeightWork = NONE
    update: WeightWork = NONE


class AbstractWeights(ABC):
    """A weight policy. Its settings are its fields.

    A policy declares which version each pass uses and by how many updates it is extrapolated. Copies, staleness and traffic follow
    from that (`copies`, `staleness`, `traffic`), as the runtime keeps versions. Where the backward of a micro-batch goes through
    what its forward used, that has memory of its own if an update comes between the two, and micro-batches that use the same
    version or prediction share it. Elsewhere there is one prediction at a time: a pass on the weights as they are uses the
    optimizer's own, and a pass on the prediction that is there already makes none. One mini-batch of the steady state decides all
    of it, so the versions of a policy must advance by one with every mini-batch.

    Args:
        accumulation: micro-batches between two updates, for planners; None leaves it to them.
        correction: what an update does about gradients that are late; None: nothing.
    """

    flushes: ClassVar[bool] = False
    """Whether the pipeline drains before every update, so that there is one version at a time."""
    repeats: ClassVar[bool] = True
    """Whether the forward of a micro-batch in flight can be repeated, so that a checkpoint needs no drain."""
    in_step: ClassVar[bool] = False
    """Whether all stages use one version for a micro-batch, so that a weight that several of them share stays one."""

    drifts: ClassVar[Extrapolation | None] = None
    """The cost of extrapolating along a running mean of past updates, whatever the optimizer; None where that is not done."""

    accumulation: int | None
    correction: AbstractCorrection | None = None

    @property
    def name(self) -> str:
        """The word that chooses it (`strategy/weights=stash`): the name of its file, unless it says another."""
        return file_word(self)

    @property
    @abstractmethod
    def predictor(self) -> Predictor | None:
        """How forwards extrapolate weights; None where all passes use weights that are, or were, the stage's own."""

    @property
    @abstractmethod
    def backward(self) -> Backward:
        """The weights that gradients of inputs go through."""

    @abstractmethod
    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """The version that the forward of `microbatch` uses, or that is extrapolated for it.

        Args:
            start: as in `PipelinePosition.latest`; no earlier version is there.
        """

    def microbatch_size(self, minibatch_size: int) -> int | None:
        """Samples of a micro-batch, where the user has not said otherwise; None leaves them to the planner.

        Raises:
            InvalidConfig: the accumulation that was set does not divide the mini-batch.
        """
        count = self.accumulation
        if count is not None and minibatch_size % count:
            rule = f"must divide minibatch_size={minibatch_size}"
            raise InvalidConfig("strategy.weights.accumulation", count, rule, "set strategy.weights.accumulation=1")
        return None if count is None else minibatch_size // count

    @abstractmethod
    def least_accumulation(self, depth: int) -> int:
        """Micro-batches that a mini-batch must have at least in a pipeline of `depth` stages."""

    @abstractmethod
    def horizon(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """Updates by which the weights of a forward are extrapolated; 0: not at all."""

    @abstractmethod
    def backward_horizon(self, position: PipelinePosition) -> int:
        """The same of a backward; below 0 for weights of the past."""

    def drift_memory(self, position: PipelinePosition) -> float:
        """Weight of the past in the running mean of a stage's updates, where horizons are below 0; 0 for no mean."""
        return 0.0

    def backward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """The version that the backward of `microbatch` uses, or that is extrapolated for it."""
        return self.forward_version(position, microbatch, start) if self.backward == "same" else position.batch(microbatch)

    def lasting(self, position: PipelinePosition, microbatch: int, start: int = 0) -> Source | None:
        """What the forward of `microbatch` uses that an update before its backward would overwrite; None: the weights as they
        are, and no update comes between."""
        version, horizon = self.forward_version(position, microbatch, start), self.horizon(position, microbatch, start)
        return (version, horizon) if horizon or version < position.batch(microbatch) else None

    def changes(self, position: PipelinePosition) -> bool:
        """Whether some backward of the stage uses other weights than its forward did."""
        return self.backward != "same" and _changes(self, position)

    def copies(self, position: PipelinePosition) -> int:
        """Copies of the weights that the stage holds at most, the latest one included."""
        return _copies(self, position)

    def follows_position(self, depth: int) -> bool:
        """Whether `copies` follow from a stage's distance to the sink alone, in pipelines of at most `depth` stages."""
        shallow, deep = (PipelinePosition(warmup=0, depth=stages) for stages in (1, max(depth, 2)))
        return self.flushes or self.copies(shallow) == self.copies(deep)

    def most_copies(self, depth: int) -> int:
        """The largest of `copies` over the stages of any pipeline of at most `depth` stages: the first stage of the deepest holds
        most."""
        accumulation = max(self.accumulation or 1, self.least_accumulation(depth))
        return self.copies(PipelinePosition(warmup=depth - 1, depth=depth, accumulation=accumulation))

    def staleness(self, position: PipelinePosition) -> int:
        """Updates made between the weights that a gradient's forward starts from and the update that applies it, at most."""
        return _staleness(self, position)

    def corrects(self, position: PipelinePosition) -> AbstractCorrection | None:
        """The correction of a stage; None where its gradients are not late."""
        return self.correction if self.correction and self.staleness(position) else None

    def traffic(self, position: PipelinePosition, prediction: Extrapolation) -> Traffic:
        """What the policy moves through memory, beyond passes and updates of one version.

        Args:
            prediction: the cost of the optimizer's rule.
        """
        moves = _moves(self, position)
        forward, backward = (
            prediction.once * way.extrapolations + prediction.each * way.updates_ahead + COPY * way.copies
            for way in (moves.forward, moves.backward)
        )
        update = COPY * moves.update + (prediction.update if self.predictor or self.drift_memory(position) else NONE)
        if correction := self.corrects(position):
            backward, update = backward + correction.cost.backward, update + correction.cost.update
        return Traffic(forward, backward, update)

    def check(self, position: PipelinePosition) -> None:
        """Refuse a pipeline in which the policy cannot hold.

        Raises:
            InvalidConfig: too few micro-batches in a mini-batch; a correction without what it needs.
        """
        least = self.least_accumulation(position.depth)
        if position.accumulation < least:
            rule = f"strategy.weights={self.name} needs at least {least} micro-batches in a mini-batch, as many as are in flight"
            fix = "use a smaller microbatch_size, a larger minibatch_size, fewer devices, or strategy/weights=stash"
            raise InvalidConfig("micro-batches in a mini-batch", position.accumulation, rule, fix)
        if self.correction and self.correction.damping:
            if self.backward != "same":
                rule = f"needs the weights of the forward beside its gradients, and strategy.weights={self.name} keeps none"
                raise InvalidConfig("strategy.weights.correction", self.correction.name, rule, "use strategy/weights=stash")
            if position.accumulation > 1:
                rule = f"damps the gradient of a whole update, and here that is a sum over {position.accumulation} micro-batches"
                fix = "set strategy.weights.accumulation=1 and leave microbatch_size out"
                raise InvalidConfig("strategy.weights.correction", self.correction.name, rule, fix)


class AbstractActual(AbstractWeights):
    """Policies whose passes use weights that were, or are, the stage's own: nothing is extrapolated."""

    @property
    def predictor(self) -> None:
        return None

    def horizon(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return 0

    def backward_horizon(self, position: PipelinePosition) -> int:
        return 0


class AbstractRing(AbstractActual):
    """Policies that keep every version a micro-batch in flight has used, for its backward.

    Args:
        accumulation: micro-batches between two updates, for planners; None leaves it to them.
        correction: what an update does about gradients that are late; None: nothing.
    """

    @abstractmethod
    def lag(self, position: PipelinePosition) -> int:
        """Micro-batches by which the version that a forward uses is behind the latest there could be."""

    @property
    def backward(self) -> Backward:
        return "same"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        return max(start, (microbatch - self.lag(position)) // position.accumulation)

    def least_accumulation(self, depth: int) -> int:
        return 1


KNOWN = 1 << 14
"""Positions whose derived numbers are remembered: planners ask for the same ones again and again."""


def _steady(position: PipelinePosition) -> int:
    """A mini-batch for which the pipeline is full: no version is bounded by the start any more."""
    return position.depth + position.warmup + 2


@lru_cache(KNOWN)
def _extrapolates(policy: AbstractWeights, position: PipelinePosition) -> bool:
    """Whether some pass of a mini-batch uses weights ahead of the stage's own, or behind."""
    first = _steady(position) * position.accumulation
    batch = range(first, first + position.accumulation)
    return policy.backward_horizon(position) != 0 or any(policy.horizon(position, j) > 0 for j in batch)


@lru_cache(KNOWN)
def _changes(policy: AbstractWeights, position: PipelinePosition) -> bool:
    first, behind = _steady(position) * position.accumulation, policy.backward_horizon(position)
    return any(
        (policy.forward_version(position, j), policy.horizon(position, j)) != (policy.backward_version(position, j), behind)
        for j in range(first, first + position.accumulation)
    )


@lru_cache(KNOWN)
def _copies(policy: AbstractWeights, position: PipelinePosition) -> int:
    if policy.predictor is not None or policy.drifts:
        if not _extrapolates(policy, position):
            return 1
        if policy.backward != "same":
            return 2
        # Beside the weights themselves: what micro-batches in flight use and an update overwrites.
        first = _steady(position) * position.accumulation
        ends = range(first, first + position.accumulation)
        return 1 + max(len({policy.lasting(position, i) for i in range(j - position.warmup, j + 1)} - {None}) for j in ends)
    if policy.backward == "current":
        return 1
    # Right after update v the first micro-batch of the next mini-batch is in flight, or about to be, and uses the oldest version
    # that anything still needs. Versions are used in order and none is left out, so those from there to v are all alive.
    version = _steady(position)
    return 1 + version - policy.forward_version(position, version * position.accumulation)


@lru_cache(KNOWN)
def _staleness(policy: AbstractWeights, position: PipelinePosition) -> int:
    first = _steady(position) * position.accumulation
    batch = range(first, first + position.accumulation)
    return max(position.batch(j) - policy.forward_version(position, j) for j in batch)


class _WeightMean(NamedTuple):
    """What each forward, or each backward, does to the weights: a mean over some of them."""

    extrapolations: float = 0.0
    updates_ahead: float = 0.0
    copies: float = 0.0

    @classmethod
    def of(cls, horizons: list[int], passes: int) -> _WeightMean:
        """The mean over so many passes, of which some make a prediction, or a copy (0), of these horizons."""
        return cls(sum(h != 0 for h in horizons) / passes, sum(max(h, 0) for h in horizons) / passes, horizons.count(0) / passes)


class _WeightMoves(NamedTuple):
    """What is done to the weights for each forward and for each backward; copies for each update."""

    forward: _WeightMean = _WeightMean()
    backward: _WeightMean = _WeightMean()
    update: float = 0.0


@lru_cache(KNOWN)
def _moves(policy: AbstractWeights, position: PipelinePosition) -> _WeightMoves:
    """What the passes of a mini-batch of the steady state do to the weights, divided by their number."""
    m, warmup = position.accumulation, position.warmup
    if policy.copies(position) == 1:
        return _WeightMoves()
    if policy.predictor is None and policy.backward == "same":
        # A version that is still needed is copied before the update that would overwrite it.
        return _WeightMoves(update=1.0)
    first, behind = _steady(position) * m, policy.backward_horizon(position)
    if policy.backward == "same":
        sources = {j: policy.lasting(position, j) for j in range(first - warmup, first + m)}
        new = [s for j in range(first, first + m) if (s := sources[j]) and s not in [sources[i] for i in range(j - warmup, j)]]
        return _WeightMoves(forward=_WeightMean.of([horizon for _, horizon in new], m))
    forwards, backwards, held = list[int](), list[int](), None
    for j in range(first, first + m):
        # The mini-batch begins with nothing held: the update before it has made the prediction that was there an old one.
        ahead = policy.horizon(position, j + warmup)
        for horizon, made in ((ahead, forwards), (behind, backwards)):
            if horizon and horizon != held:
                made.append(horizon)
                held = horizon
    return _WeightMoves(_WeightMean.of(forwards, m), _WeightMean.of(backwards, m))
