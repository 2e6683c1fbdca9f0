"""For all tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from pathlib import Path

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
    _share_cache(tmp_path_factory)


def _share_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
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


def pytest_sessionstart(session: pytest.Session) -> None:
    """Processes that share a whole suite: what each of them would do alike is done once.

    The first of them starts the process whose forks all runs are, which takes as long as collecting does. In a fresh checkout
    the assertions of a file of tests are rewritten where it is first imported: each process begins with files of its own.
    """
    own = getattr(session.config, "workerinput", {})
    if not own or session.config.args != session.config.getini("testpaths") or session.config.option.collectonly:
        return
    number, count = int(own["workerid"].removeprefix("gw")), own["workercount"]
    if number == 0:
        from tests.support.warm import warm

        _share_cache(session.config._tmp_path_factory)
        threading.Thread(target=warm, daemon=True).start()
    root = Path(__file__).parent
    # A file outside a package has a name that pytest makes up.
    files = sorted(path for path in root.rglob("test_*.py") if path.with_name("__init__.py").exists())
    for path in files[number::count]:
        with contextlib.suppress(Exception):  # collecting tells
            importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))


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
