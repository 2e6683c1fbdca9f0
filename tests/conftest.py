"""For all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One torch thread: on a busy machine, threads that wait for each other made a 2 s test take 200 s."""
    import torch

    torch.set_num_threads(1)
