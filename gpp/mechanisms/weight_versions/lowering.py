"""The proof that a plan can run under a weight policy: every pass finds a version that there is, and one alone for each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp.errors import InvalidConfig
from gpp.graph.op_graph import OpGraph
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.plan.plan import Plan
from gpp.program.added import AbstractLowering
from gpp.program.kinds import Action
from gpp.program.program import Program
from gpp.program.steady_state import fill
from gpp.weights.base import AbstractWeights


class VersionsLowering(AbstractLowering):
    """Programs stay as they are: which version a pass uses is no action."""

    def check_stream(self, plan: Plan, graph: OpGraph, weights: AbstractWeights) -> None:
        """Refuse too few micro-batches in a mini-batch, stages that count them otherwise, and shared weights, for the policy."""
        assert isinstance(weights, AbstractVersionPolicy)  # it names this mechanism
        for s in range(len(plan.stages)):
            weights.check(plan.position(s))
        _check_versions(plan, weights)
        if tied := [] if weights.in_step else plan.shared_weights(graph):
            name, stages = tied[0]
            where = " and ".join(map(str, stages))
            rule = f"{name} is shared by stages {where}, which would use different versions of it for one micro-batch"
            fix = "set strategy/weights=double_buffer, vertical_sync or flush, or do not tie it"
            raise InvalidConfig("strategy.weights", weights.name, rule, fix)

    def due(self, plan: Plan, graph: OpGraph, program: Program) -> Mapping[int, Sequence[Action]]:
        return {}


def _check_versions(plan: Plan, weights: AbstractVersionPolicy) -> None:
    """Refuse weights that do not exist yet, and several versions for one sample where the policy promises one.

    Raises:
        InvalidConfig: names the stages.
    """
    fix = "set strategy/weights=stash, or one microbatch_size for all stages and strategy.replicas=split"
    steady = 2 + 2 * max(fill(plan), plan.depth)
    first: list[int] = []
    for s, stage in enumerate(plan.stages):
        place, before = plan.position(s), steady * plan.minibatch_size
        own = [(before + i) // stage.unit for i in range(plan.minibatch_size)]
        versions = [weights.forward_version(place, number) for number in own]
        if any(version > place.latest(number) for version, number in zip(versions, own, strict=True)):
            rule = f"stage {s} would use weights that it does not have yet: its forwards are {place.warmup} micro-batches ahead"
            raise InvalidConfig("strategy.weights", weights.name, rule, fix)
        first = first or versions
        if weights.in_step and versions != first:
            rule = (
                f"stages 0 and {s} would use different versions for one sample: they count micro-batches of other sizes, or in turn"
            )
            raise InvalidConfig("strategy.weights", weights.name, rule, fix)


LOWERING = VersionsLowering()
