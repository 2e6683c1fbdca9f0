"""Times of programs and plans; the walk along the longest path is compiled (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(__name__)
