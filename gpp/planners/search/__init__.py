"""The search over plans whose devices may hold several stages, as one walk in compiled code (`gpp.compiled`)."""

from __future__ import annotations

from typing import Final

from gpp.compiled import chosen

COMPILED: Final = chosen(__name__)
