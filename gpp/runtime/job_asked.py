"""What the settings of a run ask of mechanisms for all stages alike, whatever a plan says of its stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpp.cost.problem import Problem
from gpp.graph.captured import Captured
from gpp.mechanism import found
from gpp.models.base import describe
from gpp.optimizers import AbstractOptimizer


class AbstractAsked(ABC):
    """A mechanism that settings ask for."""

    @abstractmethod
    def by(self, optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        """Whether settings ask for it; arguments as `asked` has them."""

    def captured(self, captured: Captured, settings: Mapping[str, Any]) -> Captured:
        """The model that planners see and workers run; `settings` as `asked` has them."""
        return captured

    def posed(self, problem: Problem, settings: Mapping[str, Any]) -> Problem:
        """The planning problem; `settings` as `asked` has them."""
        return problem

    def refuse_engine(self, engine: str) -> None:
        """Refuse an engine that has a runtime of its own.

        Raises:
            InvalidConfig: names the setting.
        """
        return None


def asked(optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, AbstractAsked]:
    """The mechanisms that settings ask for, by name.

    Args:
        optimizer: as `gpp.models.base.describe` has it.
        settings: other fields of `gpp.runtime.job.Settings`.
    """
    return {name: part for name, part in found("asked", "ASKED", AbstractAsked).items() if part.by(optimizer, settings)}


def asked_by(optimizer: AbstractOptimizer, settings: Mapping[str, Any]) -> tuple[AbstractAsked, ...]:
    """The mechanisms that settings ask for; `settings` as above."""
    return tuple(asked(describe(optimizer), settings).values())


def asked_model(captured: Captured, optimizer: AbstractOptimizer, settings: Mapping[str, Any]) -> Captured:
    """A captured model as planners see it and workers run it under settings; `settings` as above."""
    for part in asked_by(optimizer, settings):
        captured = part.captured(captured, settings)
    return captured


def with_asked(problem: Problem, optimizer: AbstractOptimizer, settings: Mapping[str, Any]) -> Problem:
    """A planning problem with what the optimizer and the mechanisms that settings ask for make of it; `settings` as above."""
    norm_for = optimizer.norm_for
    problem = replace(problem, global_norm=norm_for is not None, norm_for=norm_for)
    for part in asked_by(optimizer, settings):
        problem = part.posed(problem, settings)
    return problem
