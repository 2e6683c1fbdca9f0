"""What a weight policy cannot be combined with: settings, optimizers, and tensors that a forward has computed from weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured, Derived, closure, node_references
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.corrections.base import AbstractCorrection
from gpp.optimizers import SGD, AbstractOptimizer
from gpp.runtime.job import AbstractJobPart, Job, restore


class VersionsJobPart(AbstractJobPart):
    """Checkpoints, casts, compiled stages, corrections that have nothing to work on, and tensors that follow from weights."""

    def check(self, job: Job, *, overwrites: bool) -> None:
        settings = job.settings
        policy: AbstractVersionPolicy = restore(settings.weights)
        if settings.checkpoint_every and not settings.checkpoint_drain and not policy.repeats:
            rule = f"strategy.weights={policy.name} keeps no weights by which micro-batches in flight could be repeated"
            raise InvalidConfig("checkpoint.drain", False, rule, "set checkpoint.drain=true")
        if settings.autocast and not policy.same:
            rule = f"backwards would use the cast copies of the forward's weights, and strategy.weights={policy.name} wants others"
            raise InvalidConfig("engine.autocast", settings.autocast, rule, "set engine.autocast=null, or strategy/weights=stash")
        if settings.compile:
            rule = f"a compiled stage is bound to its parameters, and strategy.weights={policy.name} exchanges them"
            raise InvalidConfig("engine.compile", settings.compile, rule, "set engine.compile=null, or strategy/weights=flush")
        if policy.correction:
            _check_correction(policy.correction, restore(settings.optimizer))
        if overwrites:
            _check_derived(policy, job)


JOB = VersionsJobPart()


def _check_derived(policy: AbstractVersionPolicy, job: Job) -> None:
    """Refuse a tensor computed from parameters that a backward would find as the forward left it.

    Raises:
        InvalidConfig: names the stage, the operator and the parameter.
    """
    found = (*job.captured.derived, *(_packed(job.captured) if job.settings.device_kind == "cuda" else ()))
    for s, stage in enumerate(job.plan.stages if found else ()):  # a graph alone has no nodes to look for them in
        if policy.changes(job.plan.position(s)):
            own = closure((node for op in stage.ops for node in job.graph.ops[op].nodes), partial(_free, job.captured))
            for derived in found:
                if derived.node in own:
                    target, params = job.captured.node_of[derived.node].target, ", ".join(derived.params)
                    rule = (
                        f"its backwards use other weights than the forwards did, and {target} of stage {s} ({derived.where}) keeps "
                        f"a tensor that the forward has computed from {params}"
                    )
                    fix = "let the operator read the parameter itself, or set strategy/weights=stash, or engine=reference"
                    raise InvalidConfig("strategy.weights", policy.name, rule, fix)


def _check_correction(correction: AbstractCorrection, optimizer: AbstractOptimizer) -> None:
    if correction.direction(0.5, 1) and not (isinstance(optimizer, SGD) and optimizer.momentum):
        rule = "is written for the steps of SGD with momentum"
        raise InvalidConfig("strategy.weights.correction", correction.name, rule, "use optimizer=sgd optimizer.momentum=0.9")
    if correction.momentum(0.5, 1, 2) != 0.5 and not optimizer.momentum_factor:
        rule = f"raises the momentum, and optimizer={type(optimizer).__name__} has none"
        raise InvalidConfig("strategy.weights.correction", correction.name, rule, "use optimizer=nadam")


def _free(captured: Captured, name: str) -> list[str]:
    """Nodes that a node needs, which belong to no operator and which its stage computes for itself."""
    node = captured.node_of[name]
    return [name for name in (*node_references(node), *node.after) if captured.node_of[name].free]


def _packed(captured: Captured) -> Iterator[Derived]:
    """Recurrent layers, whose weights cuDNN packs into memory of its own and keeps in this form."""
    for node in captured.nodes:
        if node.kind == "call" and any(part in node.target for part in ("lstm.", "gru.", "rnn_tanh.", "rnn_relu.")):
            own = [captured.node_of[name] for name in node_references(node)]
            yield Derived(
                node=node.name, params=tuple(n.target for n in own if n.kind == "param" and n.requires_grad), where=node.module
            )
