"""Seconds and bytes of operators and stages; what adds up the memory of a device is compiled (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(__name__)
