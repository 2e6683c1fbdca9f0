"""The tests marked `long`, which say little more than the shorter ones that `make test` runs.

    python -m tests.checks.long

The seconds of each are in the list at the end.
"""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "long", "--durations=0", "--durations-min=0.5", "-q"]))
