"""Sections of the configuration that are part of a run's own settings."""

from __future__ import annotations

from typing import TypedDict

from gpp.plan.loss_stage import LossScope
from gpp.settings import Count


class GraphSettings(TypedDict, total=False):
    """Settings of `graph.`: the number of operators to coarsen to."""

    max_ops: Count | None


class LossSettings(TypedDict, total=False):
    """Settings of `loss.`: the samples that the loss function is computed on at once."""

    scope: LossScope
