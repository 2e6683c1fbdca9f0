"""What takes long and says little more than its shorter forms: it runs under `GPP_EXAMPLES=long` only."""

from __future__ import annotations

import os

import pytest

long = pytest.mark.skipif(os.environ.get("GPP_EXAMPLES") != "long", reason="GPP_EXAMPLES=long runs it")
