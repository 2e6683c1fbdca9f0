"""The objects that workers have been given, compared before every step: workers do not see later changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpp.app.optimizer_factory import values_of
from gpp.capture.kept import shown
from gpp.capture.python_state import PythonState
from gpp.errors import InvalidConfig

AT_ONCE = 300
"""Places that are compared before a step: 0.4 ms. Those of a large model have their turns."""
MOST = 8
"""Most changes that are told."""
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
        self._state = PythonState({"": model, "the loss": loss})
        self._places, self._next = [*self._state.members, *self._state.places], 0
        self._tensors = [one for one in self._state.tensors.values() if not one[1].is_inference()]
        self.renew()

    def renew(self) -> None:
        """The model's weights were changed by the pipeline itself."""
        self._versions = [tensor._version for _, tensor in self._tensors]

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
        """Warn of weights, modes and values that the program has changed and that the workers have as they were."""
        versions = [tensor._version for _, tensor in self._tensors]
        if versions != self._versions:
            others = zip(self._tensors, versions, self._versions, strict=True)
            path = next(path for (path, _), now, before in others if now != before)
            begun = f"the program has changed weights of the model ({path}) after the start of the workers"
            fix = f"To clamp, write a class of optimizer whose step does it; to load, {AGAIN}"
            self._say("weights", f"{begun}, which train on with theirs. pipeline.state_dict() has those. {fix}")
        for name, module, before in self._modes:
            if module.training != before:
                where = f"{name or 'the model'} is in {'training' if module.training else 'evaluation'} mode now"
                self._say("mode", f"{where}, and the workers train it in the mode of their start; {AGAIN}")
                break
        turn = [*self._places, *self._places][self._next : self._next + min(AT_ONCE, len(self._places))]
        self._next = (self._next + len(turn)) % max(1, len(self._places))
        for place in turn:
            for path, before, now in place.changes():
                if len(self._told) < MOST:
                    rule = f"{path} was {shown(before)} when the workers started and is {shown(now)} now"
                    self._say(path, f"{rule}; they train on as it was. {AGAIN[0].upper()}{AGAIN[1:]}")

    def _say(self, what: str, words: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(words)
