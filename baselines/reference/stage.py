"""One stage of a pipeline that is followed in one process: its replicas, and its weights by the policy's version table.

This code shares nothing with the workers' weight versions (`gpp.mechanisms.weight_versions.on_worker`) but the formulas of
`prediction`, so each checks the other: a backward through other weights than its forward's is a function of its own
here (`explicit`). When the stage has made v updates, the table tells which coming forwards use
version v or a prediction from it; those values are made there and then, from the optimizer's state as it is, and kept
until their micro-batch comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from baselines.reference.corrections import corrected_step, damp
from baselines.reference.explicit import Explicit, explicit
from gpp.capture.stage import StageModule
from gpp.graph.captured import is_loss
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.on_worker.prediction import direction_kept, predictor
from gpp.optimizers import AbstractOptimizer
from gpp.runtime.nonfinite import Finding, PassPlace, Probes, nonfinite
from gpp.weights.base import PipelinePosition

EMPTY: Mapping[str, Tensor] = {}

Values = list[Tensor]
"""Tensors for the trained parameters of a stage, in one order."""


@final
class Table:
    """The values of a stage's weights in every pass.

    Args:
        masters: the trained parameters, which the optimizer updates.
        optimizer: None where it has none of its own, as all of them are tied to other stages'.
        rate: number of an update -> its learning rate.

    `staleness`: the most updates so far between a forward's version and its gradient's update.
    """

    def __init__(
        self,
        policy: AbstractVersionPolicy,
        position: PipelinePosition,
        masters: Sequence[Tensor],
        *,
        optimizer: torch.optim.Optimizer | None,
        spec: AbstractOptimizer,
        rate: Callable[[int], float],
    ) -> None:
        self.policy, self.position, self.masters, self.rate = policy, position, list(masters), rate
        self.correction, self.optimizer, self.spec = policy.corrects(position), optimizer, spec
        self.version = self.start = self.staleness = self._next = self._end = 0
        self._own = [master.data for master in masters]
        self._of: dict[int, Values] = {}
        self._predict = predictor(spec, optimizer, policy.predictor) if policy.predictor and optimizer else None

    def begin(self, first: int, count: int) -> None:
        """A pass over so many mini-batches begins, in an empty pipeline."""
        self.version = self.start = first
        self._next, self._end = first * self.position.accumulation, (first + count) * self.position.accumulation
        self._keep()

    def updated(self) -> None:
        """The optimizer has made its step."""
        self.version += 1
        self._keep()

    def _keep(self) -> None:
        """Make the values of all forwards to come that start from the present version."""
        of = self.policy.forward_version
        made: dict[int, Values] = {}
        first, stop = self._next, self._next
        while stop < self._end and of(self.position, stop, self.start) == self.version:
            stop += 1
        self._next = stop
        # Those before the next update can read the masters themselves.
        lasting = stop > first and self.position.batch(stop - 1) > self.version
        for number in range(first, stop):
            horizon = self.policy.horizon(self.position, number, self.start)
            if horizon not in made:
                made[horizon] = self._extrapolated(horizon) if horizon or lasting else self._own
            self._of[number] = made[horizon]

    def _extrapolated(self, horizon: int) -> Values:
        """The weights `horizon` updates after the present version, or before it (below 0), in memory of their own."""
        if horizon < 0 and self.optimizer:
            states = [self.optimizer.state.get(master, {}) for master in self.masters]
            return [
                own.add(state["drift"], alpha=horizon) if "drift" in state else own.clone()
                for own, state in zip(self._own, states, strict=True)
            ]
        if horizon and self._predict:
            return self._predict(self.masters, [self.rate(self.version + i) for i in range(horizon)])
        return [own.clone() for own in self._own]

    def forward(self, number: int) -> Values:
        """What the forward of a micro-batch, counted from the start of the run, computes with; called once for each."""
        self.staleness = max(
            self.staleness, self.position.batch(number) - self.policy.forward_version(self.position, number, self.start)
        )
        return self._of.pop(number)

    def backward(self) -> Values:
        """What the next backward computes with, where that is not what its forward used."""
        return self._extrapolated(self.policy.backward_horizon(self.position)) if self.policy.backward == "predicted" else self._own


@dataclass(slots=True)
class Kept:
    """Tensors that a forward leaves for its backward.

    Args:
        received: from other stages.
        outputs: for other stages.
        losses: terms of the loss that end here, by name.
        share: of the samples in the mini-batch, by which those count.
        leaves: the weights, as autograd knows them; none where the pass is explicit.
        explicit: the functions of the pass, and what the backward needs, where it may use other weights than its forward.
    """

    received: dict[str, Tensor]
    outputs: dict[str, Tensor]
    losses: dict[str, Tensor]
    share: float
    leaves: Values
    explicit: tuple[Explicit, list[Tensor]] | None


@final
class FollowedStage:
    """A stage with all of its replicas.

    Args:
        modules: one for each replica, with one set of parameters and each with its own buffers.
        runs_backward: whether gradients flow through it.
        table: says what its trained parameters are in which pass; None where it trains nothing.
        last: backwards to remember for who asks where gradients stopped being finite.

    `sums`: replica -> gradients of the mini-batch so far, in the order of the masters. `seeded`: outputs whose gradients come back
    from other stages.
    """

    def __init__(
        self, modules: Sequence[StageModule], masters: Sequence[Tensor], *, runs_backward: bool, table: Table | None, last: int
    ) -> None:
        self.modules, self.masters, self.table, self.runs_backward = list(modules), list(masters), table, runs_backward
        self.evaluation = [module.eval_module() for module in modules]
        self.inputs = modules[0].inputs
        self.sums: list[list[Tensor | None]] = []
        self.names = [name for name, p in modules[0].named_parameters() if p.requires_grad]
        self.probes = Probes(self.masters, last=last)
        self.seeded: set[str] = set()
        self.clear()
        self._present: tuple[int, Values] = -1, []
        self._explicit: dict[int, Explicit] = {}
        self._places = [_places(module, "_parameters", masters) for module in modules]

    def clear(self) -> None:
        """No gradients so far."""
        self.sums = [[None] * len(self.masters) for _ in self.modules]

    def settle(self) -> None:
        """Compute with the real weights, as between passes."""
        for replica in range(len(self.modules)):
            self._install(replica, self.masters)

    def _install(self, replica: int, tensors: Sequence[Tensor]) -> None:
        _put(self._places[replica], tensors)

    def forward(
        self, replica: int, number: int, size: int, received: dict[str, Tensor], rows: dict[str, Tensor], share: float
    ) -> tuple[Kept, dict[str, Tensor]]:
        """The forward of `size` samples of micro-batch `number` on one replica.

        Args:
            received: leaves.
            share: of these samples in the mini-batch.

        Returns:
            Tensors for the backward, with `outputs` for other stages; and the results, each its share of the
            mini-batch's mean.
        """
        module = self.modules[replica]
        if self.table and self._present[0] != number:
            # Once for all replicas, which come one after the other.
            self._present = number, self.table.forward(number)
        values, given = self._present[1], {**received, **rows}
        leaves, explicit = Values(), None
        if self.table and self.table.policy.backward != "same":
            functions = self._functions(replica, size, given)
            made, kept = functions.forward(values, list(module.buffers()), list(given.values()))
            outputs, explicit = dict(zip(module.makes, made, strict=True)), (functions, kept)
        else:
            leaves = [tensor.data.requires_grad_() for tensor in values]
            if leaves:
                self._install(replica, leaves)
            outputs = module(size, given)
        ends = {name: outputs.pop(name) for name in module.results if name in outputs}
        empty = module.counts.empty(given) if module.counts else ()
        losses = {name: value for name, value in ends.items() if is_loss(name) and name not in empty}
        results = {name: value.detach().double() * share for name, value in ends.items()}
        return Kept(received, outputs, losses, share, leaves, explicit), results

    def _functions(self, replica: int, size: int, given: dict[str, Tensor]) -> Explicit:
        """The functions of a pass over so many samples; `given` are examples of its inputs."""
        if size not in self._explicit:
            module, buffers = self.modules[replica], list(self.modules[replica].buffers())
            places = _places(module, "_buffers", buffers)

            def run(weights: Sequence[Tensor], own: Sequence[Tensor], inputs: Sequence[Tensor]) -> Values:
                self._install(replica, weights)
                _put(places, own)
                return list(module(size, dict(zip(given, inputs, strict=True))).values())

            seeded = [name in self.seeded or is_loss(name) for name in module.makes]
            try:
                self._explicit[size] = explicit(run, self.masters, buffers, list(given.values()), seeded.__getitem__)
            finally:
                self._install(replica, self.masters)
                _put(places, buffers)
        return self._explicit[size]

    def backward(self, replica: int, kept: Kept, gradients: dict[str, Tensor], place: PassPlace) -> None:
        """The backward of a forward's `kept`; the tensors in `received` then hold their gradients.

        Args:
            gradients: of its outputs.
            place: which backward it is.
        """
        if kept.explicit:
            self._backward_explicitly(replica, kept, gradients)
            self._probe(replica, place)
            return
        pairs = [(kept.outputs[name], grad) for name, grad in gradients.items() if kept.outputs[name].requires_grad]
        roots: list[Tensor] = [output for output, _ in pairs]
        seeds: list[Tensor | None] = [grad for _, grad in pairs]
        terms = [value * kept.share for value in kept.losses.values()]
        loss = sum(terms[1:], terms[0]) if terms else None
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            seeds.append(None)
        sums = self.sums[replica]
        for leaf, grad in zip(kept.leaves, sums, strict=True):
            leaf.grad = grad
        if roots:
            torch.autograd.backward(roots, seeds)
        for i, leaf in enumerate(kept.leaves):
            sums[i] = leaf.grad
        if self.table and self.table.correction and self.table.optimizer:
            # A correction that damps goes with one micro-batch an update, so these are the gradients of this one.
            damp(self.table.correction, self.table.optimizer, sums, kept.leaves, self.masters, self.table.version)
        self._probe(replica, place)

    def _probe(self, replica: int, place: PassPlace) -> None:
        if self.probes.index is not None:
            self.probes.note(place, self.sums[replica][self.probes.index])

    def finding(
        self, stage: int, place: PassPlace | None = None, kept: Kept | None = None, rows: Mapping[str, Tensor] = EMPTY
    ) -> Finding:
        """What is not finite: of the weights, and of a forward."""
        made = kept.outputs if kept else {}
        return Finding(
            stage=stage,
            microbatch=place.microbatch if place else -1,
            received=nonfinite(kept.received) if kept else (),
            rows=nonfinite(rows),
            made=nonfinite({**made, **(kept.losses if kept else {})}),
            weights=nonfinite(dict(zip(self.names, self.masters, strict=True))),
            backward=self.probes.first(),
        )

    def _backward_explicitly(self, replica: int, kept: Kept, gradients: dict[str, Tensor]) -> None:
        assert kept.explicit and self.table
        functions, saved = kept.explicit
        seeds = {**gradients, **{name: torch.full_like(value, kept.share) for name, value in kept.losses.items()}}
        made = functions.backward(self.table.backward(), saved, [seeds[self.modules[replica].makes[i]] for i in functions.roots])
        sums, received = self.sums[replica], [tensor for tensor in kept.received.values() if tensor.requires_grad]
        for i, grad in enumerate(made[: len(sums)]):
            if grad is not None:
                before = sums[i]
                sums[i] = torch.empty_like(self.masters[i]).copy_(grad) if before is None else before.add_(grad)
        for tensor, grad in zip(received, made[len(sums) :], strict=True):
            tensor.grad = grad


def _places(module: StageModule, kind: str, tensors: Sequence[Tensor]) -> list[tuple[dict[str, Any], str, int]]:
    """Where a module holds `tensors`: (holder, name, place in the list); tied ones are held at several places."""
    index = {id(tensor): i for i, tensor in enumerate(tensors)}
    holders = [getattr(owner, kind) for owner in module.modules()]
    return [(holder, name, index[id(t)]) for holder in holders for name, t in holder.items() if id(t) in index]


def _put(places: list[tuple[dict[str, Any], str, int]], tensors: Sequence[Tensor]) -> None:
    for holder, name, i in places:
        holder[name] = tensors[i]


def advance(table: Table, rate: float) -> None:
    """The optimizer's step; keeps where it goes, where a policy that predicts would not find it in the optimizer's state."""
    policy, spec, optimizer = table.policy, table.spec, table.optimizer
    assert optimizer
    keeps = policy.predictor is not None and policy.prediction(spec).kept > 0
    params = [p for group in optimizer.param_groups for p in group["params"]]
    memory = policy.drift_memory(table.position)
    before = [(p, p.data.clone()) for p in params if p.grad is not None] if memory else []
    with direction_kept(spec, optimizer, params) if keeps else nullcontext():
        if table.correction:
            corrected_step(table.correction, policy.staleness(table.position), spec, optimizer, rate)
        else:
            optimizer.step()
    for p, old in before:
        mean = optimizer.state[p].get("drift", torch.zeros_like(old))
        optimizer.state[p]["drift"] = mean.mul(memory).add(p.data - old, alpha=1.0 - memory)
