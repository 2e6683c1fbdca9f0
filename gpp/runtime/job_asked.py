"""What the settings of a run ask of mechanisms: for all stages alike, whatever a plan says, and in place of training."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, PlainSerializer, PlainValidator

from gpp.cost.problem import Problem
from gpp.cost.regime import AbstractCourse
from gpp.errors import InvalidFile
from gpp.graph.captured import Captured
from gpp.mechanism import found
from gpp.models.base import describe
from gpp.optimizers import AbstractOptimizer
from gpp.serialization import from_json, to_json


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


class AbstractJobCourse(AbstractCourse):
    """A course as its workers know it; settings.json has it by the name of the mechanism."""

    @abstractmethod
    def short(self, steps: int, rate: float | None) -> Self:
        """The settings of a rehearsal.

        Args:
            steps: how often the program is repeated.
            rate: mini-batches that come in a second; None: another one always waits.
        """

    @abstractmethod
    def words(self, step: int) -> str:
        """What a repetition is called; `step` is below 0 for those of a warm-up."""


def _kinds() -> dict[str, type[AbstractJobCourse]]:
    return found("course", "COURSE", type)


def _by_name(given: Any) -> AbstractJobCourse:
    if isinstance(given, AbstractJobCourse):
        return given
    known = _kinds()
    if not isinstance(given, dict) or len(given) != 1 or not given.keys() <= known.keys():
        raise ValueError(f"have one entry, for one of {', '.join(known) or 'no mechanism'}")
    ((name, fields),) = given.items()
    try:
        return from_json(known[name], json.dumps(fields))
    except InvalidFile as error:
        raise ValueError(f"fit {name!r}, of which {error.place} {error.rule}") from None


def with_earlier(content: Any) -> Any:
    """The content of a settings.json in which the course stands where it does now: it was under its own name once, and had the
    numbers that mechanisms keep to. What stands in both places is left there, and refused by who reads it."""
    if not isinstance(content, dict):
        return content
    nested = {name: content[name] for name in _kinds() if content.get(name) is not None}
    if nested and content.get("course") is None:
        content = {name: value for name, value in content.items() if name not in nested} | {"course": nested}
    course = content.get("course")
    if isinstance(course, dict) and len(course) == 1 and "kept" not in content:
        ((name, own),) = course.items()
        if isinstance(own, dict) and "kept" in own:
            rest = {key: value for key, value in own.items() if key != "kept"}
            content = {**content, "kept": own["kept"], "course": {name: rest}}
    return content


Course = Annotated[
    AbstractJobCourse | None,
    PlainValidator(_by_name),
    PlainSerializer(lambda course: {course.mechanism: json.loads(to_json(course))}),
    # Left out of files where there is none: the settings of a training read as they always did.
    Field(exclude_if=lambda course: course is None),
]
