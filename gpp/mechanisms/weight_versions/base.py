"""The promise of a weight policy: the version of the weights behind every pass, and the copies that it costs.

The pipeline does not drain: the forward of a micro-batch is computed several updates before the gradient of it is applied, and
policies differ in what they do about that. Micro-batches and updates are counted from the start of the run, by each stage; where
replicas take micro-batches in turn, by each replica, which counts its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.mechanisms.weight_versions.costs import ALONG_A_MOMENTUM, COPY, Extrapolation, Predictor, extrapolation
from gpp.optimizers import AbstractOptimizer
from gpp.settings import Count
from gpp.weights.base import NONE, AbstractWeights, PipelinePosition, Traffic

Backward = Literal["same", "current", "predicted"]
"""Those that the forward used; the latest; others, extrapolated for the backward."""


Source = tuple[int, int]
"""A version, and the updates by which it is extrapolated: passes of one source use the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbstractVersionPolicy(AbstractWeights):
    """A weight policy of pipelines that do not drain. Its settings are its fields.

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

    mechanism: ClassVar[str] = "weight_versions"
    repeats: ClassVar[bool] = True
    """Whether the forward of a micro-batch in flight can be repeated, so that a checkpoint needs no drain."""
    in_step: ClassVar[bool] = False
    """Whether all stages use one version for a micro-batch, so that a weight that several of them share stays one."""

    drifts: ClassVar[Extrapolation | None] = None
    """The cost of extrapolating along a running mean of past updates, whatever the optimizer; None where that is not done."""

    accumulation: Count | None = None
    correction: AbstractCorrection | None = None

    @property
    def predictor(self) -> Predictor | None:
        """How forwards extrapolate weights; None where all passes use weights that are, or were, the stage's own."""
        return None

    @property
    def backward(self) -> Backward:
        """The weights that gradients of inputs go through."""
        return "same"

    def forward_version(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """The version that the forward of `microbatch` uses, or that is extrapolated for it: the latest one.

        Args:
            start: as in `PipelinePosition.latest`; no earlier version is there.
        """
        return position.latest(microbatch, start)

    def horizon(self, position: PipelinePosition, microbatch: int, start: int = 0) -> int:
        """Updates by which the weights of a forward are extrapolated; 0: not at all."""
        return 0

    def backward_horizon(self, position: PipelinePosition) -> int:
        """The same of a backward; below 0 for weights of the past."""
        return 0

    def drift_memory(self, position: PipelinePosition) -> float:
        """Weight of the past in the running mean of a stage's updates, where horizons are below 0; 0 for no mean."""
        return 0.0

    def backward_version(self, position: PipelinePosition, microbatch: int) -> int:
        """The version that the backward of `microbatch` uses, or that is extrapolated for it."""
        return self.forward_version(position, microbatch) if self.same else position.batch(microbatch)

    def lasting(self, position: PipelinePosition, microbatch: int, start: int = 0) -> Source | None:
        """What the forward of `microbatch` uses that an update before its backward would overwrite; None: the weights as they
        are, and no update comes between."""
        version, horizon = self.forward_version(position, microbatch, start), self.horizon(position, microbatch, start)
        return (version, horizon) if horizon or version < position.batch(microbatch) else None

    @property
    def same(self) -> bool:
        return self.backward == "same"

    def changes(self, position: PipelinePosition) -> bool:
        return self.backward != "same" and _changes(self, position)

    def copies(self, position: PipelinePosition) -> int:
        return _copies(self, position)

    def staleness(self, position: PipelinePosition) -> int:
        return _staleness(self, position)

    def corrects(self, position: PipelinePosition) -> AbstractCorrection | None:
        """The correction of a stage; None where its gradients are not late."""
        return self.correction if self.correction and self.staleness(position) else None

    def prediction(self, optimizer: AbstractOptimizer | None) -> Extrapolation:
        """The cost of the policy's predictions under an optimizer, or under one that keeps its last direction (None)."""
        if self.drifts or not self.predictor:
            return self.drifts or ALONG_A_MOMENTUM
        return extrapolation(optimizer, self.predictor) if optimizer else ALONG_A_MOMENTUM

    def kept_factor(self, optimizer: AbstractOptimizer | None) -> float:
        # Stages at the sink, whose gradients are not late, do without what a correction keeps.
        return self.prediction(optimizer).kept + (self.correction.cost.kept if self.correction else 0.0)

    def optimizer_at(self, optimizer: AbstractOptimizer, position: PipelinePosition) -> AbstractOptimizer:
        if not (correction := self.corrects(position)):
            return optimizer
        found = correction.momentum(optimizer.momentum_factor, self.staleness(position), position.depth)
        return optimizer if found == optimizer.momentum_factor else optimizer.with_momentum(found)

    def traffic(self, position: PipelinePosition, optimizer: AbstractOptimizer | None) -> Traffic:
        return self.moved(position, self.prediction(optimizer))

    def moved(self, position: PipelinePosition, prediction: Extrapolation) -> Traffic:
        """`traffic`, with predictions of any cost."""
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


KNOWN = 1 << 14
"""Positions whose derived numbers are remembered: planners ask for the same ones again and again."""


def _steady(position: PipelinePosition) -> int:
    """A mini-batch for which the pipeline is full: no version is bounded by the start any more."""
    return position.depth + position.warmup + 2


def _steady_batch(position: PipelinePosition) -> range:
    """The micro-batches of that mini-batch."""
    first = _steady(position) * position.accumulation
    return range(first, first + position.accumulation)


@lru_cache(KNOWN)
def _changes(policy: AbstractVersionPolicy, position: PipelinePosition) -> bool:
    behind = policy.backward_horizon(position)
    return any(
        (policy.forward_version(position, j), policy.horizon(position, j)) != (policy.backward_version(position, j), behind)
        for j in _steady_batch(position)
    )


@lru_cache(KNOWN)
def _copies(policy: AbstractVersionPolicy, position: PipelinePosition) -> int:
    if policy.predictor is not None or policy.drifts:
        ends = _steady_batch(position)
        if not policy.backward_horizon(position) and not any(policy.horizon(position, j) > 0 for j in ends):
            return 1  # no pass uses weights ahead of the stage's own, or behind
        if policy.backward != "same":
            return 2
        # Beside the weights themselves: what micro-batches in flight use and an update overwrites.
        return 1 + max(len({policy.lasting(position, i) for i in range(j - position.warmup, j + 1)} - {None}) for j in ends)
    if policy.backward == "current":
        return 1
    # Right after update v the first micro-batch of the next mini-batch is in flight, or about to be, and uses the oldest version
    # that anything still needs. Versions are used in order and none is left out, so those from there to v are all alive.
    version = _steady(position)
    return 1 + version - policy.forward_version(position, version * position.accumulation)


@lru_cache(KNOWN)
def _staleness(policy: AbstractVersionPolicy, position: PipelinePosition) -> int:
    return max(position.batch(j) - policy.forward_version(position, j) for j in _steady_batch(position))


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
def _moves(policy: AbstractVersionPolicy, position: PipelinePosition) -> _WeightMoves:
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
