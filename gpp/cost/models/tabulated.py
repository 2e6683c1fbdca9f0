"""Times that a profile gives, exactly: the graph's FLOPs are seconds (`gpp.formats.profiles`)."""

from __future__ import annotations

from typing import final

from gpp.cost.models.constant import Constant
from gpp.settings import settings


@final
@settings("cost")
class Tabulated(Constant):
    """One sample is one micro-batch of the profile; n samples take n times as long, whatever the device.

    A device's `speed_factor` counts; its data sheet does not. Profiles time no optimizer.
    """
