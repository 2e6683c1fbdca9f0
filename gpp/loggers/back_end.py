"""The common part of loggers over another package, which may be missing, and may fail at any time."""

from __future__ import annotations

import os
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from gpp.errors import InvalidConfig
from gpp.loggers.base import AbstractRecord


def need(package: str, fix: str) -> None:
    """Refuse a logger whose package is not installed; nothing is imported.

    Raises:
        InvalidConfig: names the package.
    """
    if find_spec(package) is None:
        raise InvalidConfig("logger", package, "needs a Python package that is not installed", f"{fix}, or set logger=none")


class BackEndRecord(AbstractRecord):
    """A record that another package keeps. The first failure becomes a warning; later calls do nothing.

    Args:
        open_run: opens the package's own record.
        warnings: what the user is to be told in any case.
    """

    back_end: ClassVar[str]
    """Name of the package, for people."""
    shows: ClassVar[bool] = True

    def __init__(self, open_run: Callable[[], Any], warnings: Sequence[str] = ()) -> None:
        self.warnings, self._run = tuple(warnings), None
        try:
            self._run = open_run()
            self.hints = self._where(self._run)
        except Exception as error:
            self._fail("start", error)

    @abstractmethod
    def _where(self, run: Any) -> tuple[str, ...]:
        """Command lines to look at an open record."""

    @abstractmethod
    def _abandon(self, run: Any) -> None:
        """Close a record that has failed."""

    def _fail(self, what: str, error: Exception) -> None:
        self.warnings += (f"{self.back_end} stopped recording ({what}): {type(error).__name__}: {error}",)
        run, self._run = self._run, None
        if run is not None:
            with suppress(Exception):  # that it does not close either is no news
                self._abandon(run)

    def _try(self, what: str, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._fail(what, error)


def from_here(path: str | Path) -> str:
    """A path as it is shortest from this folder, for a line that a terminal of 80 columns does not break."""
    return shlex.quote(min(os.path.relpath(path), os.path.abspath(path), key=len))


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under `prefix/`, by which both dashboards group their charts."""
    return {f"{prefix}/{name}": value for name, value in values.items()}
