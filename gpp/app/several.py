"""Modes that plan with several strategies: what each refuses before anything is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpp.errors import InvalidConfig

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment

SEVERAL: Final = ("compare", "max_batch")
"""Modes that plan with each of `strategies`."""


def check_survey(experiment: Experiment) -> None:
    """Refuse settings that a mode for several strategies cannot be combined with.

    Raises:
        InvalidConfig: names the setting.
    """
    mode, engine = experiment.mode, experiment.engine
    if experiment.confirm:
        _check_confirm(experiment)
    if mode not in SEVERAL:
        return
    if experiment.plan is not None:
        raise InvalidConfig("plan", experiment.plan, f"mode={mode} makes its own plans", "leave plan out, or set mode=plan")
    if not experiment.strategies:
        raise InvalidConfig("strategies", [], f"mode={mode} needs one strategy at least", "set strategies=[graphpipe]")
    if engine.planner is not None:
        rule = f"runs one stage whatever the strategy: nothing to {'compare' if mode == 'compare' else 'search'}"
        raise InvalidConfig("engine", engine.name, rule, "leave engine out")


def _check_confirm(experiment: Experiment) -> None:
    """Refuse to confirm what no workers can."""
    if experiment.mode != "max_batch":
        raise InvalidConfig("confirm", True, "is for what mode=max_batch has found", "leave confirm out, or set mode=max_batch")
    if not experiment.engine.bounds_memory:
        rule = "runs plans on workers whose memory is bounded, which only engine=distributed has"
        raise InvalidConfig("confirm", True, rule, "set engine=distributed and a cluster of this machine, or leave confirm out")
