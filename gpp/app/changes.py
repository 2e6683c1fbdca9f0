"""The objects that workers have been given, compared before every step: workers do not see later changes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from gpp.app.optimizer_factory import values_of
from gpp.errors import InvalidConfig

MOST = 64
"""Most entries of a list or a dict of plain values that are looked at."""
NUMBER = (bool, int, float, str)
AGAIN = "set it before gpp.parallelize, or close this pipeline and call gpp.parallelize again"


class UserObjects:
    """A model, a loss and an optimizer as they were when the workers got them.

    Args:
        made: the optimizer whose settings the workers follow; None where they have settings of their own.
        warn: gets a warning of each change that may be none for the training, the first time.
    """

    def __init__(self, model: nn.Module, loss: Any, made: torch.optim.Optimizer | None, warn: Callable[[str], None]) -> None:
        self._model, self._loss, self._made, self._warn = model, loss, made, warn
        self._told: set[str] = set()
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._settings = values_of(made) if made else []
        self._groups = self._members()
        self._modes = [(name, module, module.training) for name, module in model.named_modules()]
        self._plain = [*_plain(model), *_plain_of_loss(loss)]
        self.renew()

    def renew(self) -> None:
        """The model's weights were changed by the pipeline itself."""
        self._versions = [p._version for _, p, _ in self._trained if not p.is_inference()]

    def _members(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._made.param_groups] if self._made else []

    def settings(self) -> list[dict[str, Any]] | None:
        """The settings of the optimizer's groups, if a scheduler or the program has changed them since they were asked for last.

        Raises:
            InvalidConfig: the groups have other parameters; a parameter is trained that was not, or the other way round.
        """
        for name, param, before in self._trained:
            if param.requires_grad != before:
                rule = f"was {before} when the workers started, who train by that"
                raise InvalidConfig(f"{name}.requires_grad", param.requires_grad, rule, AGAIN)
        if self._made is None:
            return None
        if self._members() != self._groups:
            raise InvalidConfig("optimizer", type(self._made).__name__, "has other parameters than when the workers started", AGAIN)
        found = values_of(self._made)
        # What torch's schedulers ask of an optimizer that has stepped; here the workers' have.
        self._made._opt_called = True  # type: ignore[attr-defined]
        if found == self._settings:
            return None
        self._settings = found
        return found

    def look(self) -> None:
        """Warn of weights, modes and plain values that the program has changed and that the workers have as they were."""
        versions = [p._version for _, p, _ in self._trained if not p.is_inference()]
        if versions != self._versions:
            self._say(
                "weights",
                "the program has changed weights of the model after the start of the workers, which train on with theirs. "
                "pipeline.state_dict() has those. To clamp, write a class of optimizer whose step does it; to load, " + AGAIN,
            )
        for name, module, before in self._modes:
            if module.training != before:
                where = f"{name or 'the model'} is in {'training' if module.training else 'evaluation'} mode now"
                self._say("mode", f"{where}, and the workers train it in the mode of their start; {AGAIN}")
                break
        for where, names, pick, held, before in self._plain:
            now = _picked(pick, held)
            if now != before:
                for name, one, other in zip(names, before, now, strict=True):
                    if one != other:
                        path = f"{where}.{name}" if where else name
                        rule = f"{path} was {one!r} when the workers started and is {other!r} now; they train on with {one!r}"
                        self._say(path, f"{rule}. {AGAIN[0].upper()}{AGAIN[1:]}")

    def _say(self, what: str, words: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(words)


Plain = tuple[str, list[str], Callable[[Any], Any], Mapping[str, Any], Any]
"""Where values are, their names, what picks them, the mapping that has them, and a copy of the values."""


def _plain(model: nn.Module) -> Iterator[Plain]:
    for name, module in model.named_modules():
        yield from _values(name or type(module).__name__, vars(module), leaves_out=("training",))


def _plain_of_loss(loss: Any) -> Iterator[Plain]:
    """Plain values that a loss is made of: attributes, arguments of a partial, and what its code reads around it."""
    while isinstance(loss, functools.partial):
        yield from _values("loss", loss.keywords)
        loss = loss.func
    if hasattr(loss, "named_modules"):
        yield from _plain(loss)
        return
    owner = getattr(loss, "__self__", loss)
    if hasattr(owner, "__dict__") and not isinstance(owner, type):
        yield from _values("loss", vars(owner))
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    if code is not None:
        cells = dict(zip(code.co_freevars, loss.__closure__ or (), strict=True))
        yield from _values("loss", _Cells(cells))
        known = {name: loss.__globals__[name] for name in code.co_names if name in loss.__globals__}
        yield from _values("loss", loss.__globals__, among=known)


class _Cells(Mapping[str, Any]):
    """The variables around a function, by name."""

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # an empty cell
            return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _values(where: str, held: Mapping[str, Any], *, leaves_out: tuple[str, ...] = (), among: Any = None) -> Iterator[Plain]:
    names = [name for name, value in (among or held).items() if name not in leaves_out and _is_plain(value)]
    if names:
        pick = itemgetter(*names) if len(names) > 1 else lambda mapping: (mapping[names[0]],)
        yield where, names, pick, held, _picked(pick, held)


def _picked(pick: Callable[[Any], Any], held: Mapping[str, Any]) -> Any:
    """The values as they are now; of lists and dicts copies."""
    try:
        found = pick(held)
    except KeyError:
        return ()
    if any(isinstance(value, list | dict) for value in found):
        return tuple(json.loads(json.dumps(value)) if isinstance(value, list | dict) else value for value in found)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MOST and all(isinstance(key, str) and isinstance(one, NUMBER) for key, one in value.items())
    if isinstance(value, list):
        return len(value) <= MOST and all(isinstance(one, NUMBER) for one in value)
    return isinstance(value, NUMBER)
