"""A check that a captured model computes what the user's own module computes.

torch.export drops without a word what it cannot trace: hooks on tensors, numbers that Python draws or counts, tensors that are
kept in attributes. So both are run before a worker starts: the module itself, with all its hooks, and the captured graph on the
same weights, samples and random numbers. Compared are the loss, the gradient of every parameter and the values of all parameters
and buffers afterwards, in two steps with an update in between, which shows what one step leaves for the next; then the loss in
evaluation. The module is left as it was.

What differs is refused. What a step changes in Python or hooks up, and what has no effect on any of these numbers, is a warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpp.capture.faithful.numbers import Numbers, differing, flat, listed, off, plain
from gpp.capture.faithful.seen import cut_lines, hooked_lines, line_of, seeded_lines, standing_hooks
from gpp.capture.faithful.sides import SEED, Graph, Own, Unknown
from gpp.capture.kept import Change, advanced, random_states, seed_all, seed_python
from gpp.capture.user_lines import REWRITE
from gpp.errors import CaptureError
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured, Checked
from gpp.models.losses import Loss

SAMPLES = 2
"""Samples that are compared: the fewest of which one can be mistaken for another. If their loss is not finite, all are taken."""

LARGE_BYTES, LARGE_FLOPS = 1 << 26, 1e9
"""Of the weights, and of a forward: above either, a step takes so long that a second one must have a reason."""

DRAWS = 8
"""Forwards that tell whether numbers drawn by Python matter to the loss."""

_STATE = (
    "make it a buffer (self.register_buffer) that the forward changes in place, as in self.ema.mul_(0.9).add_(0.1 * x), or "
    "compute it outside of the model"
)
_DRAW = "draw by torch, as in torch.rand(()), and choose by torch.where"
_SEED = "draw once outside of the forward, and keep the numbers in a buffer"
_HOOK = "write its effect into the forward (h = 2 * h - h.detach() doubles the gradient of h), or into the loss"
_CUT = "set use_reentrant=False, which gives them gradients"


class _Cause(NamedTuple):
    """Something that a capture cannot carry, and what to do in its place."""

    what: str
    fix: str


def compared(
    captured: Captured,
    model: nn.Module,
    inputs: Mapping[str, Tensor] | tuple[Tensor, ...],
    targets: Mapping[str, Tensor],
    loss: Loss,
    *,
    capture_s: float,
) -> Captured:
    """The captured model with the result, and with warnings of what stays behind.

    Args:
        model, inputs, targets, loss: as they were captured.
        capture_s: seconds that the capture took.

    Raises:
        CaptureError: the captured model computes other numbers; names them, the line that makes the difference, and the fix.
    """
    began, samples, unknown = time.perf_counter(), captured.batch or SAMPLES, None
    notes: list[str] = []
    try:
        own = Own(captured, model, inputs, targets, loss, samples)
        check = _Check(captured, own, notes)
        try:
            check.run()
            captured = replace(captured, mixes=check.mixes)
        finally:
            samples = own.samples
            own.kept.put_back()
    except Unknown as error:
        unknown = str(error)
        if unknown != WITHOUT_WEIGHTS:
            notes.append(f"the captured model could not be compared with {type(model).__name__}: {unknown}")
    found = Checked(seconds=time.perf_counter() - began, capture_s=capture_s, samples=samples, unknown=unknown)
    return replace(captured, checked=found, warnings=tuple(dict.fromkeys((*captured.warnings, *notes))))


class _Check:
    """One comparison; `notes` gets what the user is to know."""

    def __init__(self, captured: Captured, own: Own, notes: list[str]) -> None:
        self.captured, self.own, self.notes = captured, own, notes
        self.mixes: bool | None = None

    def run(self) -> None:
        """Compare.

        Raises:
            Unknown, CaptureError
        """
        own, graph = self.own, Graph(self.captured, self.own)
        own.random = graph.module.has_random
        with hooked_lines() as lines, seeded_lines() as seeds, cut_lines() as cuts:
            numbers = self._finite()
        if seeds and own.random:
            # Their states are replayed here, so that no number differs.
            self._refuse(["each micro-batch draws other random numbers"], [_Cause(f"the seed that is set at {seeds[0]}", _SEED)])
        drew, changes, hooks = own.drew, self._lost(own.kept.changes()), standing_hooks(own.model)
        graph.adopt()
        differences, steps = self._compare(numbers, graph.step(), "first"), "the first step"
        if not differences and (drew or changes or not self._large()):
            own.update()
            graph.follow()
            numbers, steps = own.step(), "two steps"
            changes = list({change.path: change for change in (*changes, *self._lost(own.kept.changes()))}.values())
            differences = self._compare(numbers, graph.step(), "second")
        if not differences:
            own.update()  # an evaluation reads weights that no step has seen, and may have changed
            graph.follow()
            self._evaluation(graph, told=bool(drew or changes or lines or hooks))
            self._mode()
            self.mixes = self._mixed(graph)
        causes = [
            *(_Cause(f"the hook of the tensor at {line}", _HOOK) for line in lines),
            *(_Cause(hook, _HOOK) for hook in hooks),
            *self._of_changes(changes),
            *self._of_draws(drew),
        ]
        if differences and not causes and not cuts and (drawn := graph.draws.unlike(own.draws)):
            raise Unknown(f"it calls {drawn} for random numbers that it does not use. Fix: remove that call")
        if differences:
            where = "none of whose inputs needs a gradient, so that PyTorch gives the parameters inside none"
            self._refuse(differences, [*(_Cause(f"the checkpoint at {line}, {where}", _CUT) for line in cuts), *causes])
        if drew and self._draws_matter(seed_python):
            self._refuse(["the loss depends on what Python draws"], causes[-len(drew) :])
        if any(change.draws for change in changes) and self._draws_matter(own.kept.reseed):
            self._refuse(["the loss depends on what a generator of its own draws"], [one for one in causes if one.fix == _DRAW])
        lacks = "workers run the captured graph alone, which lacks"
        self.notes += [f"{lacks} {cause.what}; no number of {steps} depends on it" for cause in causes]

    def _mixed(self, graph: Graph) -> bool | None:
        """Whether the loss of the samples together is another than the mean of theirs; None where that is told otherwise.

        A loss function that compares samples is found without the network (`gpp.capture.coupling`).
        """
        samples = self.own.samples
        if self.captured.batch is not None or self.captured.coupled or samples < 2:
            return None
        try:
            whole, *parts = graph.of_parts([(0, samples), *((i, i + 1) for i in range(samples))])
        except (RuntimeError, IndexError, ValueError) as error:
            what = f"{self.own.name} fails on a part of a batch, which is what a device sees: {str(error).splitlines()[0]}"
            raise CaptureError(f"{what}. Fix: make what counts samples (offsets, numbers of rows) in the forward") from error
        if graph.module.has_random and differing(whole, *graph.of_parts([(0, samples)])):
            return None  # an evaluation draws other numbers for the same samples
        means = {name: torch.stack([part[name] for part in parts]).mean() for name in whole}
        return bool(differing(whole, means))

    def _large(self) -> bool:
        """Whether a step takes seconds."""
        flops = self.own.samples * sum(op.forward_flops for op in self.captured.graph.ops)
        return self.own.weight_bytes > LARGE_BYTES or flops > LARGE_FLOPS

    def _finite(self) -> Numbers:
        """A step of the user's module whose loss is finite.

        Raises:
            Unknown: there is none.
        """
        own, failed = self.own, Unknown("the loss of the example is not finite. Fix: give an example with a finite loss")
        for samples in dict.fromkeys((own.samples, self.captured.batch or max(SAMPLES, len(next(iter(own.rows.values())))))):
            if samples != own.samples:
                own.kept.put_back()
                own.take(samples)
            try:
                numbers = own.step()
            except Unknown as error:
                failed = error
                continue
            if all(bool(value.isfinite()) for value in numbers.losses.values()):
                return numbers
        raise failed

    def _compare(self, own: Numbers, graph: Numbers, when: str) -> list[str]:
        """Phrases of what differs."""
        losses = differing(own.losses, graph.losses)
        others = {name: self.own.left_alone(name, now) for name, now in own.tensors.items() if name not in graph.tensors}
        self._forward_differs = bool(losses)
        phrases = [f"{name} is {plain(own.losses[name])} and not {plain(graph.losses[name])}" for name in losses]
        phrases += listed(differing(own.gradients, graph.gradients), "the gradient of")
        phrases += listed(differing(own.tensors, {**graph.tensors, **others}, joint=False), "the value left in")
        return [f"in the {when} step {phrases[0]}", *phrases[1:]] if phrases else []

    def _lost(self, changes: list[Change]) -> list[Change]:
        """Those that a capture does not make itself: it writes into tensors that are no buffers, and workers keep them."""
        constants = {node.target for node in self.captured.nodes if node.kind == "constant"}
        if constants.isdisjoint(name for node in self.captured.nodes for name in node.mutates):
            return changes
        self.notes += [
            f"workers update {change.path}, and the model's own keeps its first value: it is a tensor and no buffer. Fix: "
            f"self.register_buffer"
            for change in changes
            if change.written
        ]
        return [change for change in changes if not change.written]

    def _of_changes(self, changes: Iterable[Change]) -> Iterator[_Cause]:
        for change in changes:
            line = self._line(lambda path=change.path: self.own.kept.changed(path))
            at = f" at {line}" if line else ""
            if change.draws:
                yield _Cause(f"what the generator {change.path.removeprefix('the variable ')} draws{at}", _DRAW)
            else:
                yield _Cause(f"the change of {change}{at}", _STATE)

    def _of_draws(self, drew: tuple[str, ...]) -> Iterator[_Cause]:
        for name in drew:
            seeded: dict[str, Any] = {}

            def changed(name: str = name, seeded: dict[str, Any] = seeded) -> bool:
                return bool(seeded) and name in advanced(seeded)

            line = self._line(changed, lambda seeded=seeded: seeded.update(random_states()))
            words = "Python's module random" if name == "random" else "numpy.random"
            yield _Cause(f"what {words} draws{f' at {line}' if line else ''}", _DRAW)

    def _line(self, changed: Callable[[], bool], seeded: Callable[[], None] = lambda: None) -> str | None:
        """The user's line after which `changed` is true in a step from the beginning."""
        self.own.kept.put_back()
        seed_all(SEED)
        seeded()
        return line_of(self.own.forward_and_backward, changed)

    def _draws_matter(self, reseed: Callable[[int], None]) -> bool:
        """Whether the loss differs where only the generators that are reseeded draw other numbers."""
        found = set()
        for seed in range(DRAWS):
            self.own.kept.put_back()
            reseed(seed)
            with torch.no_grad():
                found.add(tuple(float(value) for value in self.own.forward().values()))
        return len(found) > 1

    def _refuse(self, differences: list[str], causes: list[_Cause]) -> None:
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        what = "; ".join(cause.what for cause in causes) or self._module()
        fix = "; ".join(dict.fromkeys(cause.fix for cause in causes)) or REWRITE
        name = self.own.name
        raise CaptureError(f"the captured model does not compute what {name} computes: {shown}. It lacks: {what}. Fix: {fix}")

    def _module(self) -> str:
        """The first module whose output differs, in words."""
        own = self.own
        if not self._forward_differs:
            return "what the backward of the module does beyond the gradients of its operators"
        own.kept.put_back()
        outputs: list[tuple[str, Tensor]] = []

        def noting(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs.extend((path, tensor.detach().clone()) for tensor in flat(output))

            return hook

        handles = [module.register_forward_hook(noting(path)) for path, module in own.model.named_modules()]
        seed_all(SEED)
        try:
            with torch.no_grad():
                own.forward()
        finally:
            for handle in handles:
                handle.remove()
        own.kept.put_back()
        graph = Graph(self.captured, own)
        graph.adopt()
        made = graph.watched()
        for path, output in outputs:
            if not any(tensor.shape == output.shape and not off(output, tensor, 0.0) for tensor in made):
                return f"what {f'the module {path}' if path else 'the model itself'} does, the first whose output differs"
        return "what the loss does"

    def _evaluation(self, graph: Graph, *, told: bool) -> None:
        """Compare the losses of the module in evaluation.

        Args:
            told: whether the user is told that the training may differ.
        """
        own = self.own
        modes = {module: module.training for module in own.whole.modules()}
        try:
            own.whole.eval()
            seed_all(SEED)
            with torch.no_grad():
                losses = own.forward()
        except Exception as error:
            self.notes.append(f"the evaluation of {own.name} could not be compared: it raises {type(error).__name__}: {error}")
            return
        finally:
            for module, mode in modes.items():
                module.training = mode
        made = graph.evaluated()
        for name in differing(losses, made):
            self.notes.append(
                f"in evaluation {name} of {own.name} is {plain(losses[name])}, and that of the captured model {plain(made[name])}: "
                "it evaluates what it trains, with dropout off, running statistics and no updates of buffers; other code for "
                "`not self.training` is not run" + ("" if told else ". Training is not affected")
            )

    def _mode(self) -> None:
        """Say that the model trains in evaluation mode, where training mode would be different."""
        own = self.own
        if any(module.training for module in own.model.modules()):
            return
        found = []
        for mode in (False, True):
            own.kept.put_back()
            try:
                own.model.train(mode)
            except NotImplementedError:  # a module of torch.export has one mode
                return
            seed_all(SEED)
            with torch.no_grad():
                found.append(own.forward())
        own.kept.put_back()
        if differing(*found):
            self.notes.append(
                f"{own.name} is in evaluation mode, and is trained so, as PyTorch does: without dropout, and with the running "
                "statistics of batch norm. Say model.train() before for training mode"
            )
