"""Forwards and backwards of one stage on one device: its module, its weights, its micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from gpp.graph.captured import LOSS, is_loss
from gpp.program.kinds import BACKWARD, FORWARD
from gpp.runtime.nonfinite import Finding, PassPlace, Probes, Seen, nonfinite
from gpp.runtime.transport.channels import Mark
from gpp.runtime.worker.around import AbstractAround, AbstractRest
from gpp.runtime.worker.mailbox import Mailbox
from gpp.runtime.worker.seat import Portion, Seat, generators

if TYPE_CHECKING:
    from gpp.capture.stage import StageModule
    from gpp.runtime.worker.around import AbstractStageWeights

Fetch = Callable[[int, int], dict[str, torch.Tensor]]

Span = tuple[Mark, Mark]
"""When a computation began and when it ended, by the clock of the device."""


def on_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor on a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


class _OutputEdge(NamedTuple):
    """The place where an output's gradient comes in, if one does, and the output itself, as long as somebody holds it."""

    requires_grad: bool
    root: GradientEdge | None
    storage: StorageWeakRef
    form: tuple[torch.dtype, torch.Size, tuple[int, ...], int]

    def tensor(self) -> torch.Tensor | None:
        """The output; None if nobody holds it any more."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return on_storage(storage, *self.form)


def _edges(outputs: Mapping[str, torch.Tensor]) -> dict[str, _OutputEdge]:
    return {
        name: _OutputEdge(
            value.requires_grad,
            get_gradient_edge(value) if value.requires_grad else None,
            StorageWeakRef(value.untyped_storage()),
            (value.dtype, value.size(), value.stride(), int(value.storage_offset())),
        )
        for name, value in outputs.items()
    }


class _LossRoot(NamedTuple):
    """A loss: the tensor where the backward begins, and its value in memory of its own.

    The tensor that the pass has made is let go of: PyTorch makes the mean of squared errors, of one number, in the memory of all of
    them.
    """

    root: GradientEdge | None
    value: torch.Tensor


@dataclass(slots=True)
class _OpenPass:
    """A micro-batch between its forward and its backward."""

    # An `_OutputEdge` in place of a tensor lets go of it: only the stage that reads it, or autograd, holds it then.

    leaves: dict[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor | _OutputEdge]
    losses: list[_LossRoot]
    share: float


OnNonFinite = Callable[[Seen, int, int], None]
"""Function that is called with a loss that is not finite, and the samples [lo, hi) of the pass that it is the loss of."""


def _no_data(lo: int, hi: int) -> dict[str, torch.Tensor]:
    raise RuntimeError("a pass was started without `begin`")


class StageRunner:
    """Runs forwards and backwards of one stage on one device.

    Args:
        module: the stage's module, or the one that evaluates (`StageModule.eval_module`).
        mailbox: gives the tensors received for a forward or backward, and takes the tensors to be sent.
        portion: samples that the device holds; a micro-batch's loss counts by its share of the mini-batch.
        train: backward passes follow, so what they need is kept.
        weights: decides which weights a pass uses; None where there is one version.
        on_nonfinite: called at the end of a forward whose loss is not finite.
        probes: are told of every backward.

    `around` is what a mechanism does around its passes; None where they keep what autograd keeps. `loss_factor` is
    what losses are multiplied by before their backwards; None for nothing.
    """

    def __init__(
        self,
        module: StageModule,
        *,
        seat: Seat,
        mailbox: Mailbox,
        portion: Portion,
        train: bool = True,
        weights: AbstractStageWeights | None = None,
        on_nonfinite: OnNonFinite | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.around: AbstractAround | None = None
        self.loss_factor: Callable[[], float] | None = None
        self.module, self.stage, self.mailbox, self.portion, self.train = module, mailbox.stage, mailbox, portion, train
        self.now, self._piece = seat.clock.now, portion.piece
        # Reading a loss makes the host of a card wait: they are looked at when `examine` is called.
        self.deferred = seat.card is not None
        self.weights, self.on_nonfinite, self.probes = weights, on_nonfinite, probes
        self.masters = [p for p in module.parameters() if p.requires_grad]
        self._seeded = generators(seat.device) if module.has_random else ()
        self._probed = self.masters[probes.index] if probes and probes.index is not None else None
        self.results: dict[int, dict[str, float | torch.Tensor]] = {}
        self._fetch: Fetch = _no_data
        self._seed: Callable[[int], int] = int
        self._step = 0
        self._passes: dict[int, _OpenPass] = {}
        self._loss_seeds: dict[tuple[torch.dtype, float], torch.Tensor] = {}
        self._unread: list[tuple[str, int, int, int, float | torch.Tensor]] = []
        # A card's rules for narrow passes may make another type than a processor's, by which messages are laid out.
        self._specs, self._casts = mailbox.boundary.specs(), module.cut.captured.passes is not None
        sent = {name for lay in mailbox.boundary.outgoing.values() for name in lay.names}
        # What another stage of this device gets as it came: one output more, whose gradient is added to the stage's own.
        self._handed_on = tuple(name for name in module.receives if name in sent)
        self._differentiated = (
            frozenset(name for name, spec in self._specs.items() if spec.differentiable) if train else frozenset()
        )

    def begin(self, fetch: Fetch, seed: Callable[[int], int], step: int) -> None:
        """Start a pass. `results` then fills: mini-batch of the pass -> name -> this device's share, a number where losses
        are looked at in passing.

        Args:
            fetch: (lo, hi) -> the user inputs and targets of those samples of the pass.
            seed: micro-batch -> seed of its random operations.
            step: optimizer steps done before.
        """
        self._fetch, self._seed, self._step, self.results = fetch, seed, step, {}
        self.module.renew()

    def _place(self, microbatch: int, lo: int, hi: int) -> PassPlace:
        minibatch, within = divmod(microbatch, self.portion.accumulation)
        before = minibatch * self.portion.num_samples
        return PassPlace(step=self._step + minibatch, sample=lo - before, end=hi - before, microbatch=within)

    def forward(self, microbatch: int) -> Span | None:
        """Run the module on the piece of `microbatch` that this device holds; None if it holds none."""
        piece = self._piece(microbatch)
        if piece is None:
            return None
        lo, hi = piece
        module, wanted = self.module, self._differentiated
        leaves = {
            name: tensor.requires_grad_() if name in wanted else tensor for name, tensor in self.mailbox.take(FORWARD, microbatch)
        }
        values = {**leaves, **self._fetch(lo, hi)} if module.inputs else leaves
        start = self.now()
        if self.weights:
            self.weights.forward(microbatch // self.portion.stride)
        if self._seeded:
            seed = self._seed(microbatch)
            for generator in self._seeded:
                generator.manual_seed(seed)
        hooks = self.weights.hooks if self.weights else None
        if self.around:
            with self.around.forward(microbatch, hooks) as watcher:
                outputs = module.forward(hi - lo, values, watcher)
        elif hooks:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                outputs = module.forward(hi - lo, values)
        else:
            outputs = module.forward(hi - lo, values)
        empty = module.counts.empty(values) if module.counts else ()
        losses = self._take_results(microbatch, lo, hi, outputs, empty) if module.results else []
        for name in self._handed_on:
            outputs[name] = leaves[name]
        end = self.now()
        if self._casts:
            outputs = {name: value.to(self._specs[name].dtype) for name, value in outputs.items()}
        if self.train:
            roots = _edges(outputs) if self.around else outputs
            self._passes[microbatch] = _OpenPass(leaves, roots, losses, (hi - lo) / self.portion.num_samples)
        # A message without tensors, which only says whose turn it is, is one too.
        self.mailbox.put(FORWARD, microbatch, lo, {name: value.detach() for name, value in outputs.items()})
        if self._unread and not self.deferred:
            self.examine()
        return start, end

    def _take_results(
        self, microbatch: int, lo: int, hi: int, outputs: dict[str, torch.Tensor], empty: Collection[str]
    ) -> list[_LossRoot]:
        """Take the results out of `outputs`, and count them; returns the losses, those in `empty` without a gradient."""
        portion, losses = self.portion, list[_LossRoot]()
        share, minibatch = (hi - lo) / portion.num_samples, microbatch // portion.accumulation
        for name in self.module.results:
            if name not in outputs:
                continue
            value = outputs.pop(name)
            # On a processor a number costs nothing; a card's host would wait for it.
            own = value.detach().clone()
            number = own if self.deferred else float(own.item())
            part = (number.double() if isinstance(number, torch.Tensor) else number) * share
            totals = self.results.setdefault(minibatch, {})
            totals[name] = totals[name] + part if name in totals else part
            if is_loss(name):
                if isinstance(number, torch.Tensor) or not math.isfinite(number):
                    self._unread.append((name, microbatch, lo, hi, number))
                losses.append(_LossRoot(get_gradient_edge(value) if value.requires_grad and name not in empty else None, own))
        return losses

    def examine(self) -> None:
        """Look at the losses since the last call that have not been found finite; the first that is not is told."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        values = [value for *_, value in unread if isinstance(value, torch.Tensor)]
        # One copy for all of them: each makes the host wait.
        numbers = torch.stack(values).tolist() if values else [value for *_, value in unread]
        for (name, microbatch, lo, hi, _), number in zip(unread, numbers, strict=True):
            if not math.isfinite(number):
                if self.on_nonfinite:
                    place = self._place(microbatch, lo, hi)
                    self.on_nonfinite(Seen(name=name, value=float(number), stage=self.stage, place=place), lo, hi)
                return

    def look(self, lo: int, hi: int) -> tuple[Finding, ...]:
        """The values that are not finite: weights, and micro-batches in flight with samples in [lo, hi) of the pass."""
        own = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        weights, backward = nonfinite(own), self.probes.first() if self.probes else None
        found = [Finding(stage=self.stage, weights=weights, backward=backward)]
        for microbatch, kept in list(self._passes.items()):
            first, end = self._piece(microbatch) or (0, 0)
            if max(lo, first) < min(hi, end):
                outputs = {name: out.tensor() if isinstance(out, _OutputEdge) else out for name, out in kept.outputs.items()}
                there = {name: tensor for name, tensor in outputs.items() if tensor is not None}  # what somebody still holds
                made = {**there, **({LOSS: sum(loss.value for loss in kept.losses)} if kept.losses else {})}
                found.append(
                    Finding(
                        stage=self.stage,
                        microbatch=microbatch % self.portion.accumulation,
                        received=nonfinite(kept.leaves),
                        rows=nonfinite(self._fetch(first, end)) if self.module.inputs else (),
                        made=nonfinite(made),
                        gone=tuple(name for name in kept.outputs if name not in there),
                    )
                )
        return tuple(found)

    def _loss_seed(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """The gradient with which a backward begins at a loss: its share of the mini-batch, times `loss_factor`."""
        key = loss.dtype, share * (self.loss_factor() if self.loss_factor else 1.0)
        if key not in self._loss_seeds:
            self._loss_seeds[key] = torch.full_like(loss, key[1], requires_grad=False)
        return self._loss_seeds[key]

    def _note(self, microbatch: int, piece: tuple[int, int]) -> None:
        """Let the probe see the result of a backward."""
        if self.probes and self._probed is not None:
            self.probes.note(self._place(microbatch, *piece), self._probed.grad)

    def finish(self, microbatch: int, rest: AbstractRest) -> Span | None:
        """Make the gradients of the weights that `backward` has left; None if this device holds no piece of `microbatch`."""
        piece = self._piece(microbatch)
        if piece is None:
            return None
        start, number = self.now(), microbatch // self.portion.stride
        if self.weights:
            self.weights.collect(number)
        rest.finish(microbatch, number)
        if self.weights:
            self.weights.done(number)
        self._note(microbatch, piece)
        return start, self.now()

    def backward(self, microbatch: int, rest: AbstractRest | None = None) -> Span | None:
        """Run the backward on the piece of `microbatch` that this device holds; None if it holds none.

        Args:
            rest: takes what is left for `finish`; None: nothing is.
        """
        piece = self._piece(microbatch)
        if piece is None:
            return None
        done = self._passes.pop(microbatch)
        if self.around:
            self.around.arrive(microbatch)
        roots, seeds = self._roots(done, microbatch)
        start, number = self.now(), microbatch // self.portion.stride
        if self.weights:
            self.weights.backward(number)
            if not rest:
                self.weights.collect(number)
        if roots:
            # What `torch.autograd.backward` calls. Its checks take 30 us of Python, and the engine makes the same ones.
            _engine_run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if rest:
            rest.keep(microbatch, number)
        else:
            if self.weights:
                self.weights.done(number)
            self._note(microbatch, piece)
        end = self.now()
        made = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in done.leaves.items()
            if leaf.requires_grad
        }
        if rest:
            for way, tensors in rest.sent(microbatch, made).items():
                self.mailbox.put(way, microbatch, piece[0], tensors)
        else:
            self.mailbox.put(BACKWARD, microbatch, piece[0], made)
        return start, end

    def _roots(self, done: _OpenPass, microbatch: int) -> tuple[list[Any], list[torch.Tensor]]:
        """The tensors at which the gradients of a micro-batch come in, and these gradients."""
        gradients: dict[str, torch.Tensor] = {}
        for name, grad in self.mailbox.take(BACKWARD, microbatch):
            gradients[name] = gradients[name] + grad if name in gradients else grad
        roots: list[Any] = []
        seeds: list[torch.Tensor] = []
        for name, grad in gradients.items():
            output = done.outputs[name]
            if output.requires_grad:
                roots.append(output.root if type(output) is _OutputEdge else output)
                seeds.append(grad)
        for loss in done.losses:
            if loss.root:
                roots.append(loss.root)
                seeds.append(self._loss_seed(loss.value, done.share))
        return roots, seeds
