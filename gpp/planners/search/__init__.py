"""What planners do most often, in compiled code (`gpp.compiled`); a walk over plans whose devices may hold several stages."""

from __future__ import annotations

from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(__name__)
