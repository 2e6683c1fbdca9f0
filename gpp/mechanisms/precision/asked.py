"""The setting `engine.autocast`, and what it changes in a planning problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpp.cost.models.analytical import Analytical
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig
from gpp.graph.captured import Captured
from gpp.runtime.job_asked import AbstractAsked


class PrecisionAsked(AbstractAsked):
    """A narrower type holds for all stages."""

    def by(self, optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        return settings.get("autocast") is not None

    def captured(self, captured: Captured, settings: Mapping[str, Any]) -> Captured:
        if not captured.nodes:
            rule = "says no types of its tensors, which engine.autocast narrows"
            raise InvalidConfig("model", captured.name, rule, "set engine.autocast=null, or use a model that is captured")
        from gpp.mechanisms.precision.narrow import narrowed

        return captured if captured.passes == settings["autocast"] else narrowed(captured, settings["autocast"])

    def posed(self, problem: Problem, settings: Mapping[str, Any]) -> Problem:
        if isinstance(problem.cost, Analytical):
            problem = replace(problem, cost=replace(problem.cost, narrow=settings["autocast"]))
        if problem.global_norm or settings["autocast"] != "float16":
            return problem
        norm_for = "engine.autocast", "float16", "set engine.autocast=bfloat16, which needs no loss scale"
        return replace(problem, global_norm=True, norm_for=norm_for)


ASKED = PrecisionAsked()
