"""The two that are compared: the user's module with its loss, and the captured graph on its weights."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gpp.capture.codec import is_random
from gpp.capture.faithful.numbers import Numbers, flat, telling, total_of
from gpp.capture.given import given
from gpp.capture.kept import KeptModules, advanced, random_states, seed_all
from gpp.capture.stage import build_stage
from gpp.capture.trace import Whole, resized
from gpp.capture.user_lines import REWRITE, where
from gpp.errors import CaptureError
from gpp.graph.captured import WITHOUT_WEIGHTS, Captured, is_loss
from gpp.models.losses import Loss


class Draws(TorchDispatchMode):
    """Keeps the generator's state before every draw, with the operator and the shapes that it was asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.states: list[tuple[tuple[Any, ...], Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, list(args), kwargs):
            self.draw(_key(func, args, kwargs))
        return func(*args, **kwargs)

    def draw(self, key: tuple[Any, ...]) -> None:
        """A draw is next."""
        state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        self.states.append((key, state))


class Replayed(Draws):
    """Draws from the states that an earlier run had.

    Args:
        earlier: the first run; of its draws those are taken that this run makes, too, in order.
    """

    def __init__(self, earlier: Draws) -> None:
        super().__init__(earlier.device)
        self._left = list(earlier.states)

    def draw(self, key: tuple[Any, ...]) -> None:
        super().draw(key)
        for number, (other, state) in enumerate(self._left):
            if other == key:
                del self._left[: number + 1]
                if self.device.type == "cuda":
                    torch.cuda.set_rng_state(state, self.device)
                else:
                    torch.set_rng_state(state)
                return

    def unlike(self, earlier: Draws) -> str | None:
        """An operator that drew more often in the earlier run, so that the numbers here may be another draw's; None if none did."""
        own, other = (Counter(key for key, _ in draws.states) for draws in (self, earlier))
        return next((str(key[0]) for key in own if own[key] != other[key]), None)


def _key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    values = tree_flatten((args, kwargs))[0]
    return (str(func), *((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v) for v in values))


UPDATE = 1e-2
"""The length of the update between two steps, as a share of each parameter's norm."""

SEED = 0
"""Both sides begin every step with it."""


class Unknown(Exception):
    """The two cannot be compared."""


class Own:
    """The user's module and loss on some samples.

    Attributes:
        kept: what is to be put back.
        drew: which of Python's generators the last step has advanced.
        draws: random numbers of the last forward, if `random`.
        flat: the samples, in the order of `names`.
    """

    def __init__(
        self, captured: Captured, model: nn.Module, inputs: Any, targets: Mapping[str, Tensor], loss: Loss, samples: int
    ) -> None:
        asked = given(model, inputs)
        examples, call = asked.tensors, asked.call
        self.name, self.model, self.aliases = type(model).__name__, model, captured.aliases
        self.rows = {**examples, **{f"target:{name}": tensor for name, tensor in targets.items()}}
        self.terms: tuple[str, ...] = ()
        self.whole = Whole(model, call, tuple(examples), tuple(targets), loss, {}, {}, lambda names: setattr(self, "terms", names))
        self.samples, self.random, self.drew = samples, False, tuple[str, ...]()
        held = [*self.whole.parameters(), *self.whole.buffers()]
        devices = {tensor.device for tensor in held}
        if any(tensor.is_meta for tensor in held):
            raise Unknown(WITHOUT_WEIGHTS)
        if len(devices) > 1:
            raise Unknown(f"its weights are on several devices ({', '.join(sorted(map(str, devices)))})")
        self.device = next(iter(devices), torch.device("cpu"))
        self.draws = Draws(self.device)
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        # A copy of the weights, and the gradients of both sides.
        needed, free = 3 * self.weight_bytes, free_bytes()
        if self.device.type == "cpu" and free is not None and needed > free:
            raise Unknown(f"its weights and gradients take {needed / 1e9:.1f} GB here, and {free / 1e9:.1f} GB are free")
        self.take(samples)
        self.kept = KeptModules(self.whole.roots, values=True)

    def take(self, samples: int) -> None:
        """Compute on so many samples of the example."""
        self.samples = samples
        self.flat = tuple(telling(resized(tensor, samples)).to(self.device) for tensor in self.rows.values())

    def step(self) -> Numbers:
        """Forward and backward.

        Raises:
            Unknown: the user's code fails on these samples.
        """
        seed_all(SEED)
        before = random_states()
        try:
            losses = self.forward_and_backward()
        except (Exception, SystemExit) as error:
            at = where(traceback.extract_tb(error.__traceback__))
            raise Unknown(f"it fails on the example, at {at}: {type(error).__name__}: {error}") from error
        self.drew = advanced(before)
        named = list(self.whole.named_parameters())
        return Numbers(
            losses={name: value.detach() for name, value in losses.items()},
            gradients={self._captured_name(name): parameter.grad for name, parameter in named},
            tensors={self._captured_name(name): t.detach() for name, t in (*named, *self.whole.named_buffers())},
        )

    def forward_and_backward(self) -> dict[str, Tensor]:
        """The terms of the loss; gradients are new."""
        for parameter in self.whole.parameters():
            parameter.grad = None
        with torch.enable_grad():
            losses = self.forward()
            if (total := total_of(losses)).requires_grad:
                total.backward()
        return losses

    def forward(self) -> dict[str, Tensor]:
        """Run the module; returns the terms of the loss."""
        self.draws = Draws(self.device)
        with self.draws if self.random else contextlib.nullcontext():
            made = self.whole(*(tensor.clone() for tensor in self.flat))  # a forward may write into its inputs
        return dict(zip(self.terms, made, strict=True))

    def update(self) -> None:
        """A small step down the gradient: what was computed from the weights before must not be there any more."""
        with torch.no_grad():
            for parameter in self.whole.parameters():
                gradient = parameter.grad
                if gradient is not None and (norm := float(gradient.norm())) > 0:
                    parameter.data.add_(gradient.to_dense(), alpha=-UPDATE * float(parameter.norm()) / norm)

    def left_alone(self, name: str, now: Tensor) -> Tensor:
        """The right value of a tensor that the graph does not have: as it was before, or as the update has made it."""
        tensor = self.found(name)
        kept = tensor is not None and not tensor.requires_grad and id(tensor) in self.kept.values
        return self.kept.value(tensor) if kept and tensor is not None else now

    def found(self, path: str) -> Tensor | None:
        """The tensor of the model, or of a loss that is a module, by its captured name; None where there is none."""
        for root in (self.model, self.whole):
            value: Any = root
            for part in path.split("."):
                value = getattr(value, part, None)
            if isinstance(value, Tensor):
                return value
        return None

    def _captured_name(self, name: str) -> str:
        name = name.removeprefix("model.")
        return self.aliases.get(name, name)


class Graph:
    """The captured graph as one stage; what a step writes is a copy of its own."""

    def __init__(self, captured: Captured, own: Own) -> None:
        self._user = own
        self.module = build_stage(captured, [node for op in captured.graph.ops for node in op.nodes], device=own.device)
        self._written = {name for node in captured.nodes for name in node.mutates}
        counts = [self.module.counts.module] if self.module.counts else []
        self._leaves = {n: t for m in (*counts, self.module) for n, t in (*m.named_parameters(), *m.named_buffers())}
        # A tensor that only the capture has the value of is none of the model's.
        self._theirs = {name: tensor for name in self._leaves if (tensor := own.found(name)) is not None}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.draws = Replayed(own.draws)

    def adopt(self) -> None:
        """Take the weights: those that a step of the model leaves alone are shared, the others are as they were before it."""
        adopted: dict[str, Tensor] = {}
        for name, theirs in self._theirs.items():
            before, value = self._user.kept.value(theirs), theirs.detach()
            if not isinstance(theirs, nn.Parameter) or name in self._written or not torch.equal(value, before):
                value = before.clone()
                if isinstance(theirs, nn.Parameter):
                    self._copies.append((value, theirs))
            leaf = self._leaves[name]
            adopted[name] = nn.Parameter(value, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else value
        self.module.adopt(adopted)

    def follow(self) -> None:
        """Take over an update of parameters that are copies."""
        for copy, theirs in self._copies:
            copy.copy_(theirs.detach())

    def step(self) -> Numbers:
        """Forward and backward, with the random numbers of the user's last forward.

        Raises:
            CaptureError: the graph fails where the user's module does not.
        """
        trained = dict(self.module.named_parameters())
        for parameter in trained.values():
            parameter.grad = None
        try:
            with torch.enable_grad():
                losses = self._forward(self.module)
                if (total := total_of(losses)).requires_grad:
                    total.backward()
        except RuntimeError as error:
            words = f"the captured model fails where {self._user.name} does not: {error}"
            raise CaptureError(f"{words}. Fix: {REWRITE}") from error
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        return Numbers(
            losses={name: value.detach() for name, value in losses.items()},
            gradients={name: tensor.grad for name, tensor in trained.items()},
            tensors={name: tensor.detach() for name, tensor in tensors.items()},
        )

    def evaluated(self) -> dict[str, Tensor]:
        """The losses in evaluation."""
        with torch.no_grad():
            made = self._forward(self.module.eval_module())
        return {name: value for name, value in made.items() if is_loss(name)}

    def of_parts(self, parts: Iterable[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """The losses of parts [lo, hi) of the samples, each told of what the losses of all of them are divided by.

        They are those of a training pass, unless it draws random numbers or writes buffers; then of evaluation.
        """
        rows = dict(zip(self._user.rows, self._user.flat, strict=True))
        module = self.module.eval_module() if self.module.has_random or self._written else self.module

        def cut(lo: int, hi: int) -> dict[str, Tensor]:
            return {name: tensor[lo:hi] for name, tensor in rows.items()}

        given = self.module.counting(cut, cut, self._user.samples)
        with torch.no_grad():
            made = [module(hi - lo, given(lo, hi)) for lo, hi in parts]
        return [{name: value for name, value in one.items() if is_loss(name)} for one in made]

    def watched(self) -> list[Tensor]:
        """All tensors that the nodes of a training pass read and make."""
        watcher = _ValueWatcher()
        self.module.watch(frozenset())
        with torch.no_grad():
            self._forward(self.module, watcher)
        return watcher.values

    def _forward(self, module: Any, *watcher: Any) -> dict[str, Tensor]:
        user = self._user
        seed_all(SEED)
        self.draws = Replayed(user.draws)
        with self.draws if user.random else contextlib.nullcontext():
            return module(user.samples, dict(zip(user.rows, user.flat, strict=True)), *watcher)


class _ValueWatcher:
    """Keeps copies of the values of all nodes."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def given(self, batch: int, arguments: Any) -> None:
        self.values += [tensor.clone() for tensor in arguments]

    def draws(self, place: int) -> None:
        """Nothing is asked of random numbers."""

    def made(self, place: int, following: int, value: Any) -> None:
        self.values += [tensor.clone() for tensor in flat(value)]


def free_bytes() -> int | None:
    """Main memory that is free, by the kernel's own estimate; None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
