"""Figures and outcomes of the cards' tests, in one file (docs/gpus.md)."""

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.places import ALL, ONE, Place, machine, place_of

DEFAULT = "gpu-report.json"
_CARD = re.compile(rf"[\[-]({ONE}|{ALL})[\]-]")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Where the test runs; its parameter is one of `places.EVERYWHERE`."""
    return place_of(request.param)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note numbers of the test for the report, by name."""

    def note(**values: Any) -> None:
        request.node.user_properties.append(("figures", values))

    return note


class Report:
    """Gathers what the tests below tests/gpu and the others marked `gpu` say, and writes it at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def take(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        if "tests/gpu/" not in report.nodeid or (report.when != "call" and report.outcome == "passed"):
            return
        found: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            found["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.outcome == "failed":
            found["reason"] = str(report.longrepr).strip().splitlines()[-1]
        for name, values in report.user_properties:
            if name == "figures":
                found.setdefault("figures", {}).update(values)
        self.tests[report.nodeid] = found

    def write(self) -> Path | None:
        """The file; None where nobody asked for it and nothing ran on a card."""
        on_card = any(found["outcome"] != "skipped" and _CARD.search(name) for name, found in self.tests.items())
        if not self.tests or (self.path is None and not on_card):
            return None
        path = self.path or Path(DEFAULT)
        outcomes = [found["outcome"] for found in self.tests.values()]
        value = {
            "date": datetime.now(UTC).isoformat("T", "seconds"),
            "machine": machine(),
            "outcomes": {name: outcomes.count(name) for name in ("passed", "failed", "skipped")},
            "tests": dict(sorted(self.tests.items())),
        }
        path.write_text(json.dumps(value, indent=1) + "\n")
        return path


_REPORT = pytest.StashKey[Report]()


def report_of(config: pytest.Config) -> Report:
    """This session's."""
    if _REPORT not in config.stash:
        named = config.getoption("--gpu-report", default=None)
        config.stash[_REPORT] = Report(Path(named) if named else None)
    return config.stash[_REPORT]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    report_of(item.config).take(report)  # pyright: ignore[reportArgumentType]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # it has seen a part of the tests
    if path := report_of(session.config).write():
        print(f"\nfigures of the cards: {path}")
