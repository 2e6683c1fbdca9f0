"""The graph of operators that planners see; what adds up sets of them is compiled (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(__name__)
