"""Weight stashing (PipeDream, SOSP '19): the backward of a micro-batch uses the version that its forward used.

That is the latest one at the time of the forward, which differs from stage to stage: staleness is W(k) at stage k.
"""

from __future__ import annotations

from typing import final

from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.settings import settings


@final
@settings("strategy.weights")
class Stash(AbstractVersionPolicy):
    """Keeps every version that a micro-batch in flight has used: W(k) + 1 copies where each micro-batch makes an update."""
