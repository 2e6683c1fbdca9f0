"""Times of programs and plans; the walk along the longest path is compiled (`gpp.compiled`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(Path(__file__).parent, __name__)
