"""For all tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# The suite draws the same examples on every machine; GPP_EXAMPLES=many looks for new ones, for minutes.
settings.register_profile(
    "suite", derandomize=True, database=None, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("many", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("GPP_EXAMPLES", "suite"))


@pytest.fixture(autouse=True, scope="session")
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Captures are made once for all tests, whichever process runs them; none is left from an earlier session."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["GPP_CACHE"] = str(base / "cache")
    # A plan timed in place costs seconds; the tests that are about it say so.
    os.environ["GPP_REHEARSALS"] = "0"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One torch thread: on a busy machine, threads that wait for each other made a 2 s test take 200 s."""
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than there are cores, because tests of real processes wait for theirs; two more were slower."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """All that collecting has made stays: the garbage collector need not look at it again and again for the length of the suite."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="PATH", help="where `pytest -m gpu` writes its figures (docs/gpus.md)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first: they take longest, and one process runs all tests of a file.

    Those of the cards come before them, in the order of docs/gpus.md.
    """
    dist = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: 0 if item.path.parent.name == "gpu" else 1 + (item.path not in dist))
