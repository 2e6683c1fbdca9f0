"""One stage of a pipeline that is followed in one process: its replicas, and its weights by the policy's version table.

This code shares nothing with the workers' weight versions (`gpp.runtime.worker.weights`) but the formulas of
`prediction`, so each checks the other. When the stage has made v updates, the table tells which coming forwards use
version v or a prediction from it; those values are made there and then, from the optimizer's state as it is, and kept
until their micro-batch comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpp.capture.stage import StageModule
from gpp.graph.captured import LOSS, is_loss
from gpp.optimizers import AbstractOptimizer
from gpp.runtime.nonfinite import Finding, Place, Probes, nonfinite
from gpp.runtime.worker.weights.prediction import keep_direction, predictor
from gpp.weights.base import AbstractWeights, PipelinePosition

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
        policy: AbstractWeights,
        position: PipelinePosition,
        masters: Sequence[Tensor],
        *,
        optimizer: torch.optim.Optimizer | None,
        spec: AbstractOptimizer,
        rate: Callable[[int], float],
    ) -> None:
        self.policy, self.position, self.masters, self.rate = policy, position, list(masters), rate
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
        out = [torch.empty_like(own) for own in self._own]
        self._write(out, horizon)
        return out

    def _write(self, into: Values, horizon: int) -> None:
        """The weights `horizon` updates after the present version."""
        if horizon and self._predict:
            self._predict(into, self.masters, [self.rate(self.version + i) for i in range(horizon)])
            return
        for tensor, own in zip(into, self._own, strict=True):
            tensor.copy_(own)

    def forward(self, number: int) -> Values:
        """What the forward of a micro-batch, counted from the start of the run, computes with; called once for each."""
        values = self._of.pop(number)
        self.staleness = max(
            self.staleness, self.position.batch(number) - self.policy.forward_version(self.position, number, self.start)
        )
        if self.policy.backward == "same" or values is self._own:
            return values
        # The backward writes into this memory, and other micro-batches may use the same values.
        return [tensor.clone() for tensor in values]

    def backward(self, values: Values) -> None:
        """Write weights for the gradients of inputs into the memory of a forward's weights, unseen by autograd."""
        if self.policy.backward == "predicted" and (horizon := self.policy.backward_horizon(self.position)):
            self._write(values, horizon)
        elif self.policy.backward != "same" and values is not self._own:
            self._write(values, 0)


@dataclass(slots=True)
class Kept:
    """Tensors that a forward leaves for its backward."""

    received: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None
    values: Values
    leaves: Values


@final
class FollowedStage:
    """A stage with all of its replicas.

    Args:
        modules: one for each replica, with one set of parameters and each with its own buffers.
        runs_backward: whether gradients flow through it.
        table: says what its trained parameters are in which pass; None where it trains nothing.
        last: backwards to remember for who asks where gradients stopped being finite.

    `sums`: replica -> gradients of the mini-batch so far, in the order of the masters.
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
        self.clear()
        self._present: tuple[int, Values] = -1, []
        index = {id(master): i for i, master in enumerate(masters)}
        self._places = [
            [
                (owner._parameters, name, index[id(p)])
                for owner in module.modules()
                for name, p in owner._parameters.items()
                if id(p) in index
            ]
            for module in modules
        ]

    def clear(self) -> None:
        """No gradients so far."""
        self.sums = [[None] * len(self.masters) for _ in self.modules]

    def settle(self) -> None:
        """Compute with the real weights, as between passes."""
        for replica in range(len(self.modules)):
            self._install(replica, self.masters)

    def _install(self, replica: int, tensors: Sequence[Tensor]) -> None:
        for holder, name, i in self._places[replica]:
            holder[name] = tensors[i]  # type: ignore[assignment]

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
        values = self._present[1]
        leaves = [tensor.data.requires_grad_() for tensor in values]
        if leaves:
            self._install(replica, leaves)
        outputs, loss, results = module(size, {**received, **rows}), None, dict[str, Tensor]()
        for name in module.results:
            if name in outputs:
                value = outputs.pop(name)
                results[name] = value.detach().double() * share
                if is_loss(name):
                    loss = value * share if loss is None else loss + value * share
        return Kept(received, outputs, loss, values, leaves), results

    def backward(self, replica: int, kept: Kept, gradients: dict[str, Tensor], place: Place) -> None:
        """The backward of a forward's `kept`; the tensors in `received` then hold their gradients.

        Args:
            gradients: of its outputs.
            place: which backward it is.
        """
        pairs = [(kept.outputs[name], grad) for name, grad in gradients.items() if kept.outputs[name].requires_grad]
        roots: list[Tensor] = [output for output, _ in pairs]
        seeds: list[Tensor | None] = [grad for _, grad in pairs]
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            seeds.append(None)
        if self.table:
            self.table.backward(kept.values)
        sums = self.sums[replica]
        for leaf, grad in zip(kept.leaves, sums, strict=True):
            leaf.grad = grad
        if roots:
            torch.autograd.backward(roots, seeds)
        for i, leaf in enumerate(kept.leaves):
            sums[i] = leaf.grad
        if self.probes.index is not None:
            self.probes.note(place, sums[self.probes.index])

    def finding(
        self, stage: int, place: Place | None = None, kept: Kept | None = None, rows: Mapping[str, Tensor] = EMPTY
    ) -> Finding:
        """What is not finite: of the weights, and of a forward."""
        made = kept.outputs if kept else {}
        return Finding(
            stage=stage,
            microbatch=place.microbatch if place else -1,
            received=nonfinite(kept.received) if kept else (),
            rows=nonfinite(rows),
            made=nonfinite({**made, LOSS: kept.loss} if kept and kept.loss is not None else made),
            weights=nonfinite(dict(zip(self.names, self.masters, strict=True))),
            backward=self.probes.first(),
        )


def after_step(policy: AbstractWeights, spec: AbstractOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Keep where the step went, where a policy that predicts would not find it in the optimizer's state."""
    if policy.predictor and not spec.keeps_direction:
        keep_direction(spec, optimizer, [p for group in optimizer.param_groups for p in group["params"]])
