"""The setting `engine.autocast`, and what it changes in a planning problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpp.cost.problem import Problem
from gpp.runtime.job_asked import AbstractAsked


class PrecisionAsked(AbstractAsked):
    """A narrower type holds for all stages."""

    def by(self, optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        return settings.get("autocast") is not None

    def posed(self, problem: Problem, settings: Mapping[str, Any]) -> Problem:
        if problem.global_norm or settings["autocast"] != "float16":
            return problem
        norm_for = "engine.autocast", "float16", "set engine.autocast=bfloat16, which needs no loss scale"
        return replace(problem, global_norm=True, norm_for=norm_for)


ASKED = PrecisionAsked()
