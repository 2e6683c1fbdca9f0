"""Modes that plan with several strategies: what each refuses before anything is captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpp.errors import InvalidConfig

if TYPE_CHECKING:  # the command line asks for the modes alone
    from gpp.runtime.engine import AbstractEngine

SEVERAL: Final = ("compare", "max_batch")
"""Modes that plan with each of `strategies`."""


def check_survey(mode: str, engine: AbstractEngine, plan: str | None, strategies: Sequence[Any], confirm: bool) -> None:
    """Refuse settings that a mode for several strategies cannot be combined with.

    Args:
        plan, strategies, confirm: as the settings of these names have it.

    Raises:
        InvalidConfig: names the setting.
    """
    if confirm and mode != "max_batch":
        raise InvalidConfig("confirm", True, "is for what mode=max_batch has found", "leave confirm out, or set mode=max_batch")
    if confirm and not engine.bounds_memory:
        rule = "runs plans on workers whose memory is bounded, which only engine=distributed has"
        raise InvalidConfig("confirm", True, rule, "set engine=distributed and a cluster of this machine, or leave confirm out")
    if mode not in SEVERAL:
        return
    if plan is not None:
        raise InvalidConfig("plan", plan, f"mode={mode} makes its own plans", "leave plan out, or set mode=plan")
    if not strategies:
        raise InvalidConfig("strategies", [], f"mode={mode} needs one strategy at least", "set strategies=[graphpipe]")
    if engine.planner is not None:
        rule = f"runs one stage whatever the strategy: nothing to {'compare' if mode == 'compare' else 'search'}"
        raise InvalidConfig("engine", engine.name, rule, "leave engine out")
