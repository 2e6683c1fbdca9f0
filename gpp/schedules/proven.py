"""Proofs of the best order of a flow (`gpp.schedules.exact`), each made once."""

from __future__ import annotations

from functools import lru_cache

from gpp.schedules.exact import Aim, Proven, prove
from gpp.schedules.flow import Flow

MOST_TASKS = 1000
"""Passes of a step up to which a search is worth its time."""


@lru_cache(maxsize=8)
def proven(flow: Flow, hint: tuple[tuple[int, ...], ...], aim: Aim, limit: float) -> Proven:
    """The result of `prove`, kept for each flow, because a run asks for the same order several times."""
    return prove(flow, hint, aim, limit)
