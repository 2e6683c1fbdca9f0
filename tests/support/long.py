"""What takes long and says little more than its shorter forms: it runs under `GPP_EXAMPLES=long` only."""

from __future__ import annotations

import os

import pytest

LONG = os.environ.get("GPP_EXAMPLES") == "long"

long = pytest.mark.skipif(not LONG, reason="GPP_EXAMPLES=long runs it")
