"""A check that a captured model computes what the user's own module computes.

torch.export drops without a word what it cannot trace: hooks on tensors, numbers that Python draws or counts, tensors that
are kept in attributes. So both are run before a worker starts: the module itself, with all its hooks, and the captured graph on the
same weights, samples and random numbers. Compared are the loss, the gradient of every parameter and the values of all
parameters and buffers afterwards, in two steps with an update in between, which shows what one step leaves for the next; then the
loss in evaluation. The module is left as it was.

What differs is refused. What a step changes in Python or hooks up, and what has no effect on any of these numbers, is a warning.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpp.capture.blame import hooked_lines, line_of, standing_hooks
from gpp.capture.draws import Draws, Replayed
from gpp.capture.kept import Change, Kept, advanced, random_states, seed_all
from gpp.capture.stage import StageModule, build_stage
from gpp.capture.trace import REWRITE, Whole, named_inputs, resized, where
from gpp.errors import CaptureError
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured, Checked, is_loss
from gpp.models.losses import Loss

SAMPLES = 2
"""Samples that are compared: the fewest of which one can be mistaken for another. If their loss is not finite, all are taken."""

UPDATE = 1e-2
"""The length of the update between the two steps, as a share of each parameter's norm."""

LARGE_BYTES, LARGE_FLOPS = 1 << 28, 2e10
"""Of the weights, and of a forward: above either, one step is compared, since it takes seconds."""

DRAWS = 8
"""Forwards that tell whether numbers drawn by Python matter to the loss."""

_STATE = (
    "make it a buffer (self.register_buffer) that the forward changes in place, as in self.ema.mul_(0.9).add_(0.1 * x), or "
    "compute it outside of the model"
)
_DRAW = "draw by torch, as in torch.rand(()), and choose by torch.where"
_HOOK = "write its effect into the forward (h = 2 * h - h.detach() doubles the gradient of h), or into the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """What a step made: the terms of the loss; gradients, None where there are none; parameters and buffers afterwards."""

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class _Cause(NamedTuple):
    """Something that a capture cannot carry, and what to do in its place."""

    what: str
    fix: str


class _Unknown(Exception):
    """The two cannot be compared."""


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
    began = time.perf_counter()
    check = _Check(captured, model, inputs, targets, loss)
    unknown = None
    try:
        check.run()
    except _Unknown as error:
        unknown = str(error)
        if unknown != WITHOUT_WEIGHTS:
            check.notes.append(f"the captured model could not be compared with {check.name}: {unknown}")
    seconds = time.perf_counter() - began
    found = Checked(seconds=seconds, capture_s=capture_s, samples=check.samples, unknown=unknown)
    return replace(captured, checked=found, warnings=tuple(dict.fromkeys((*captured.warnings, *check.notes))))


class _Check:
    def __init__(self, captured: Captured, model: nn.Module, inputs: Any, targets: Mapping[str, Tensor], loss: Loss) -> None:
        examples, call = named_inputs(model, inputs)
        self.captured, self.name = captured, type(model).__name__
        self.rows = {**examples, **{f"target:{name}": tensor for name, tensor in targets.items()}}
        self.losses: tuple[str, ...] = ()
        self.whole = Whole(model, call, len(examples), tuple(targets), loss, {}, lambda names: setattr(self, "losses", names))
        self.samples, self.seed = captured.batch or SAMPLES, 0
        self.notes: list[str] = []

    def run(self) -> None:
        """Compare.

        Raises:
            _Unknown, CaptureError
        """
        held = [*self.whole.parameters(), *self.whole.buffers()]
        devices = {tensor.device for tensor in held}
        if any(tensor.is_meta for tensor in held):
            raise _Unknown(WITHOUT_WEIGHTS)
        if len(devices) > 1:
            raise _Unknown(f"its weights are on several devices ({', '.join(sorted(map(str, devices)))})")
        self.device = next(iter(devices), torch.device("cpu"))
        # A copy of the weights, and the gradients of both sides.
        needed, free = 3 * sum(tensor.numel() * tensor.element_size() for tensor in held), free_bytes()
        if self.device.type == "cpu" and free is not None and needed > free:
            raise _Unknown(f"its weights and gradients take {needed / 1e9:.1f} GB here, and {free / 1e9:.1f} GB are free")
        self.kept = Kept(self.whole, values=True)
        try:
            self._run()
        finally:
            self.kept.put_back()

    def _run(self) -> None:
        graph = _Graph(self.captured, self.whole, self.kept, self.device)
        self.random = graph.module.has_random
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.whole.parameters())
        self.large = weights > LARGE_BYTES or self.samples * sum(op.forward_flops for op in self.captured.graph.ops) > LARGE_FLOPS
        self._take(self.samples)
        with hooked_lines() as lines:
            own = self._step()
        if not all(bool(value.isfinite()) for value in own.losses.values()) and self.captured.batch is None:
            self.kept.put_back()
            self._take(max(SAMPLES, len(next(iter(self.rows.values())))))
            own = self._step()
        if not all(bool(value.isfinite()) for value in own.losses.values()):
            raise _Unknown("the loss of the example is not finite. Fix: give an example with a finite loss")
        drew, changes = self.drew, self.kept.changes()
        hooks = standing_hooks(self.whole.model)
        graph.adopt()
        differences = self._compare(own, graph.step(self), "first")
        if not differences and not self.large:
            self._update()
            graph.follow()
            own = self._step()
            changes = list({change.path: change for change in (*changes, *self.kept.changes())}.values())
            differences = self._compare(own, graph.step(self), "second")
        if not differences and not self.large:
            self._evaluation(graph)
        if not differences:
            self._mode()
        causes = [
            *(_Cause(f"the hook of the tensor at {line}", _HOOK) for line in lines),
            *(_Cause(hook, _HOOK) for hook in hooks),
            *self._of_changes(changes),
            *(self._of_draws(drew) if drew else ()),
        ]
        if differences and not causes and (drawn := self.replayed.unlike(self.drawn)):
            raise _Unknown(f"it calls {drawn} for random numbers that it does not use. Fix: remove that call")
        if differences:
            self._refuse(differences, causes)
        if drew and self._draws_matter():
            self._refuse(["the loss depends on what Python draws"], causes[-1:])
        steps = "the first step" if self.large else "two steps"
        self.notes += [
            f"workers run the captured graph alone, which lacks {cause.what}; no number of {steps} depends on it"
            for cause in causes
        ]

    def _take(self, samples: int) -> None:
        self.samples = samples
        self.flat = tuple(_telling(resized(tensor, samples)).to(self.device) for tensor in self.rows.values())

    def _step(self) -> _Numbers:
        """A step of the user's module, whose gradients and tensors are the result; notes which of Python's generators drew."""
        seed_all(self.seed)
        before = random_states()
        try:
            losses = self._forward_and_backward()
        except (Exception, SystemExit) as error:
            at = where(traceback.extract_tb(error.__traceback__))
            raise _Unknown(f"it fails on the example, at {at}: {type(error).__name__}: {error}") from error
        self.drew = advanced(before)
        return _Numbers(
            losses={name: value.detach() for name, value in losses.items()},
            gradients={self._own_name(name): parameter.grad for name, parameter in self.whole.named_parameters()},
            tensors={
                self._own_name(name): tensor.detach()
                for name, tensor in (*self.whole.named_parameters(), *self.whole.named_buffers())
            },
        )

    def _forward_and_backward(self) -> dict[str, Tensor]:
        for parameter in self.whole.parameters():
            parameter.grad = None
        with torch.enable_grad():
            losses = self._forward()
            if (total := _total(losses)).requires_grad:
                total.backward()
        return losses

    def _forward(self) -> dict[str, Tensor]:
        self.drawn = Draws(self.device)
        with self.drawn if self.random else contextlib.nullcontext():
            made = self.whole(*self.flat)
        return dict(zip(self.losses, made, strict=True))

    def run_graph(self, module: StageModule, *watcher: Any) -> dict[str, Tensor]:
        """A pass of the graph on the samples, with the random numbers of the last pass of the user's module."""
        seed_all(self.seed)
        self.replayed = Replayed(self.drawn)
        with self.replayed if self.random else contextlib.nullcontext():
            return module(self.samples, dict(zip(self.rows, self.flat, strict=True)), *watcher)

    def _own_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        return self.captured.aliases.get(name, name)

    def _update(self) -> None:
        """A small step down the gradient: what was computed from the weights before must not be there any more."""
        with torch.no_grad():
            for parameter in self.whole.parameters():
                gradient = parameter.grad
                if gradient is not None and (norm := float(gradient.norm())) > 0:
                    parameter.data.add_(gradient.to_dense(), alpha=-UPDATE * float(parameter.norm()) / norm)

    def _compare(self, own: _Numbers, graph: _Numbers, when: str) -> list[str]:
        """Phrases of what differs."""
        losses = _differing(own.losses, graph.losses)
        gradients = _differing(own.gradients, graph.gradients)
        others = {name: self._unchanged(name, now) for name, now in own.tensors.items() if name not in graph.tensors}
        tensors = _differing(own.tensors, {**graph.tensors, **others})
        self.forward_differs = bool(losses)
        phrases = [f"{name} is {_plain(own.losses[name])} and not {_plain(graph.losses[name])}" for name in losses]
        phrases += _listed(gradients, "the gradient of") + _listed(tensors, "the value left in")
        return [f"in the {when} step {phrases[0]}", *phrases[1:]] if phrases else []

    def _unchanged(self, name: str, now: Tensor) -> Tensor:
        """What a tensor must be that the graph does not have: as it was, or as the update has made it."""
        tensor = found(self.whole, name)
        kept = tensor is not None and not tensor.requires_grad and id(tensor) in self.kept.values
        return self.kept.value(tensor) if kept and tensor is not None else now

    def _of_changes(self, changes: Iterable[Change]) -> Iterator[_Cause]:
        for change in changes:
            line = self._line(lambda path=change.path: self.kept.changed(path))
            shown = str(change._replace(path=change.path.removeprefix("model.")))
            yield _Cause(f"the change of the attribute {shown}{f' at {line}' if line else ''}", _STATE)

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
        self.kept.put_back()
        seed_all(self.seed)
        seeded()
        return line_of(self._forward_and_backward, changed)

    def _draws_matter(self) -> bool:
        """Whether the loss differs where only Python draws other numbers."""
        found = set()
        for seed in range(DRAWS):
            self.kept.put_back()
            seed_all(seed)
            torch.manual_seed(self.seed)
            with torch.no_grad():
                found.add(tuple(float(value) for value in self._forward().values()))
        return len(found) > 1

    def _refuse(self, differences: list[str], causes: list[_Cause]) -> None:
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        what = "; ".join(cause.what for cause in causes) or self._module()
        fix = "; ".join(dict.fromkeys(cause.fix for cause in causes)) or REWRITE
        raise CaptureError(f"the captured model does not compute what {self.name} computes: {shown}. It lacks: {what}. Fix: {fix}")

    def _module(self) -> str:
        """The first module whose output differs, in words."""
        if not self.forward_differs:
            return "what the backward of the module does beyond the gradients of its operators"
        self.kept.put_back()
        outputs: list[tuple[str, Tensor]] = []

        def noting(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs.extend((path, tensor.detach().clone()) for tensor in _flat(output))

            return hook

        handles = [
            module.register_forward_hook(noting(path)) for path, module in self.whole.model.named_modules(remove_duplicate=False)
        ]
        seed_all(self.seed)
        try:
            with torch.no_grad():
                self._forward()
        finally:
            for handle in handles:
                handle.remove()
        self.kept.put_back()
        graph = _Graph(self.captured, self.whole, self.kept, self.device)
        graph.adopt()
        made = graph.watched(self)
        for path, output in outputs:
            if not any(tensor.shape == output.shape and not _off(output, tensor, 0.0) for tensor in made):
                return f"what {f'the module {path}' if path else 'the model itself'} does, the first whose output differs"
        return "what the loss does"

    def _evaluation(self, graph: _Graph) -> None:
        """Compare the losses of the module in evaluation."""
        modes = {module: module.training for module in self.whole.modules()}
        self.whole.eval()
        try:
            seed_all(self.seed)
            with torch.no_grad():
                own = self._forward()
        except Exception as error:
            self.notes.append(f"the evaluation of {self.name} could not be compared: it raises {type(error).__name__}: {error}")
            return
        finally:
            for module, mode in modes.items():
                module.training = mode
        made = graph.evaluated(self)
        for name in _differing(own, made):
            self.notes.append(
                f"in evaluation {name} of {self.name} is {_plain(own[name])}, and that of the captured model {_plain(made[name])}: "
                "it evaluates what it trains, with dropout off, running statistics and no updates of buffers; other code for "
                "`not self.training` is not run. Training is not affected"
            )

    def _mode(self) -> None:
        """Say that the model trains in evaluation mode, where training mode would be different."""
        if any(module.training for module in self.whole.model.modules()):
            return
        self.kept.put_back()
        found = []
        for mode in (False, True):
            self.whole.model.train(mode)
            seed_all(self.seed)
            with torch.no_grad():
                found.append(self._forward())
        if _differing(*found):
            self.notes.append(
                f"{self.name} is in evaluation mode, and is trained so, as PyTorch does: without dropout, and with the running "
                "statistics of batch norm. Say model.train() before for training mode"
            )


class _Graph:
    """The captured graph as one stage, on the module's own weights; what a step writes is a copy."""

    def __init__(self, captured: Captured, whole: Whole, kept: Kept, device: torch.device) -> None:
        self._kept = kept
        self.module: StageModule = build_stage(captured, [node for op in captured.graph.ops for node in op.nodes], device=device)
        self._written = {name for node in captured.nodes for name in node.mutates}
        self._own = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        # A tensor that only the capture has the value of is none of the model's.
        self._theirs = {name: tensor for name in self._own if (tensor := found(whole, name)) is not None}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def adopt(self) -> None:
        """Take the weights: those that a step of the model leaves alone are shared, the others are as they were before it."""
        adopted: dict[str, Tensor] = {}
        for name, theirs in self._theirs.items():
            before, value = self._kept.value(theirs), theirs.detach()
            if not isinstance(theirs, nn.Parameter) or name in self._written or not torch.equal(value, before):
                value = before.clone()
                if isinstance(theirs, nn.Parameter):
                    self._copies.append((value, theirs))
            own = self._own[name]
            adopted[name] = nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
        self.module.adopt(adopted)

    def follow(self) -> None:
        """Take over an update of parameters that are copies."""
        for copy, theirs in self._copies:
            copy.copy_(theirs.detach())

    def step(self, check: _Check) -> _Numbers:
        """A training step."""
        trained = dict(self.module.named_parameters())
        for parameter in trained.values():
            parameter.grad = None
        with torch.enable_grad():
            losses = check.run_graph(self.module)
            if (total := _total(losses)).requires_grad:
                total.backward()
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        return _Numbers(
            losses={name: value.detach() for name, value in losses.items()},
            gradients={name: tensor.grad for name, tensor in trained.items()},
            tensors={name: tensor.detach() for name, tensor in tensors.items()},
        )

    def evaluated(self, check: _Check) -> dict[str, Tensor]:
        """The losses in evaluation."""
        with torch.no_grad():
            made = check.run_graph(self.module.eval_module())
        return {name: value for name, value in made.items() if is_loss(name)}

    def watched(self, check: _Check) -> list[Tensor]:
        """All that the nodes of a training pass make."""
        watcher = _Watcher()
        self.module.watch(frozenset())
        with torch.no_grad():
            check.run_graph(self.module, watcher)
        return watcher.values


class _Watcher:
    """Keeps copies of the values of all nodes."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def given(self, batch: int, arguments: Any) -> None:
        self.values += [tensor.clone() for tensor in arguments]

    def draws(self, place: int) -> None:
        """Nothing is asked of random numbers."""

    def made(self, place: int, following: int, value: Any) -> None:
        self.values += [tensor.clone() for tensor in _flat(value)]


def free_bytes() -> int | None:
    """Main memory that is free, by the kernel's own estimate; None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def found(whole: Whole, path: str) -> Tensor | None:
    """The tensor of the model, or of a loss that is a module, by its captured name; None where there is none."""
    for root in (whole.model, whole):
        value: Any = root
        for part in path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor):
            return value
    return None


def _total(losses: Mapping[str, Tensor]) -> Tensor:
    total = sum(losses.values())
    assert isinstance(total, Tensor)
    return total


def _flat(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _flat(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)


def _telling(tensor: Tensor) -> Tensor:
    """Samples that tell something: numbers between 0 and 1 in place of one and the same number."""
    if not tensor.is_floating_point() or tensor.numel() < 2 or bool((tensor != tensor.flatten()[0]).any()):
        return tensor
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(tensor)


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative difference that is taken for rounding: half of the type's digits.

    Both sides call the same kernels on the same numbers, and mostly agree to the last bit; sums in another order leave some dozen
    roundings. What is dropped is a matter of per cent.
    """
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0


def _off(own: Tensor, other: Tensor, floor: float) -> float:
    """The relative difference of two tensors in the norm; 0 where it is rounding."""
    if own.shape != other.shape:
        return float("inf")
    if own.layout == other.layout == torch.strided and torch.equal(own, other):
        return 0.0
    wide = torch.complex128 if own.is_complex() else torch.float64
    a, b = own.detach().to_dense().to(wide), other.detach().to_dense().to(wide)
    if bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return 0.0
    distance, scale = float((a - b).norm()), max(float(a.norm()), float(b.norm()))
    if distance <= max(floor, tolerance(own.dtype) * scale):  # false where it is not finite
        return 0.0
    return distance / scale if scale else float("inf")


def _differing(own: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By how much tensors differ, by name; one that is None is one of zeros.

    A gradient that is zero but for rounding may be rounded otherwise: the floor is what rounding leaves of the largest.
    """
    floats = [tensor for tensor in own.values() if tensor is not None and tensor.is_floating_point()]
    eps = max((torch.finfo(tensor.dtype).eps for tensor in floats), default=0.0)
    out = {}
    exact = {name: (a, b) for name, a in own.items() if not _equal(a, b := other.get(name))}
    floor = 32 * eps * max((float(tensor.detach().to_dense().double().norm()) for tensor in floats), default=0.0) if exact else 0.0
    for name, (a, b) in exact.items():
        given = a if a is not None else b
        assert given is not None  # two that are None are equal
        zeros = torch.zeros_like(given.to_dense())
        if off := _off(a if a is not None else zeros, b if b is not None else zeros, floor):
            out[name] = off
    return out


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if not a.layout == b.layout == torch.strided or a.shape != b.shape:
        return False
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)


def _listed(found: Mapping[str, float], what: str) -> list[str]:
    return [
        f"{what} {name} is off by {min(off, 9.99):.2g} of its norm"
        for name, off in sorted(found.items(), key=lambda item: -item[1])
    ]


def _plain(value: Tensor) -> str:
    return f"{float(value):.6g}"
