"""Orders whose backwards are split."""

from typing import Final

from gpp.mechanisms.split_backward.schedules.zero_bubble_h1 import ZeroBubbleH1

OFFERED: Final = {"zero_bubble_h1": ZeroBubbleH1()}
