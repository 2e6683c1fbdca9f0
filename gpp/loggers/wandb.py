"""Weights & Biases, offline (without an account) unless the user says otherwise.

`import wandb` takes two seconds, so it waits for `start`. Nothing here asks, prints or ends a run.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from gpp.loggers.base import AbstractLogger, AbstractRecord, RunInfo
from gpp.loggers.none import NoRecord
from gpp.report.run.result import finite
from gpp.settings import NotNegative, settings

Mode = Literal["offline", "online", "disabled"]


class WandbRecord(AbstractRecord):
    """One wandb run. The first failure becomes a warning; later calls do nothing.

    Args:
        every_s: see `Wandb`.
    """

    def __init__(self, open_run: Callable[[], Any], warnings: Sequence[str] = (), every_s: float = 0.0) -> None:
        self._warnings, self._every_s = list(warnings), every_s
        self._logged, self._held = -math.inf, dict[str, float]()
        self._run: Any = None
        self._hints: tuple[str, ...] = ()
        try:
            self._run = open_run()
            self._hints = self._where()
        except Exception as error:
            self._fail("start", error)

    def _where(self) -> tuple[str, ...]:
        if self._run.settings.mode == "disabled":
            return ()
        path = shlex.quote(os.path.abspath(self._run.settings.sync_dir))
        look = f"wandb leet {path}"
        return (look, f"wandb sync {path}") if self._run.offline else (look, f"online: {self._run.url}")

    def _fail(self, what: str, error: Exception) -> None:
        self._warnings.append(f"wandb stopped recording ({what}): {type(error).__name__}: {error}")
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=1)
            except Exception as second:
                self._warnings.append(f"wandb did not close: {second}")

    def _try(self, what: str, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._fail(what, error)

    @property
    def hints(self) -> tuple[str, ...]:
        return self._hints

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._held = {"step": step, **values}
        if time.monotonic() - self._logged >= self._every_s:
            self._flush()

    def _flush(self) -> None:
        """Log the last step, if it has not been."""
        values, self._held = self._held, {}
        if values:
            self._logged = time.monotonic()
            self._try("log", lambda run: run.log(values))

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._flush()
        self._try("log_eval", lambda run: run.log({"step": step, **{f"eval/{name}": value for name, value in values.items()}}))

    def log_html(self, path: Path, name: str = "report") -> None:
        def action(run: Any) -> None:
            import wandb

            run.log({name: wandb.Html(Path(path).read_text(encoding="utf-8"), inject=False)})

        self._try("log_html", action)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def action(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._try("log_table", action)

    def log_file(self, path: Path) -> None:
        def action(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(f"{run.id}-{Path(path).name}", type="run-file")
            artifact.add_file(str(path))
            run.log_artifact(artifact)

        self._try("log_file", action)

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        self._flush()

        def action(run: Any) -> None:
            if summary:
                run.summary.update(finite(summary))
            run.finish()

        self._try("finish", action)
        self._run = None


@settings("logger")
class Wandb(AbstractLogger):
    """A wandb run in the run directory.

    Args:
        project, entity: as in wandb.
        mode: `offline` (files only, upload them later), `online` (needs a key; without one it stays offline
            and says so), `disabled`.
        group: name of the group; None takes the sweep's name.
        tags: further tags besides the run's own.
        system_metrics: whether to sample load and memory of the machine every 15 s.
        every_s: seconds between two steps that are logged; the last one always is. metrics.jsonl has all of them. A point takes
            wandb's processes a millisecond or two, which workers on the same cores lack.
    """

    project: str = "gpp"
    entity: str | None = None
    mode: Mode = "offline"
    group: str | None = None
    tags: tuple[str, ...] = ()
    system_metrics: bool = True
    every_s: NotNegative = 0.5

    def start(self, run: RunInfo) -> AbstractRecord:
        if self.mode == "disabled":
            return NoRecord()
        mode: Mode = self.mode
        warnings: list[str] = []
        if mode == "online" and not has_key():
            mode = "offline"
            warnings.append(
                "logger.mode=online, but there is no wandb key: recorded offline. "
                "Run `wandb login` once, then upload with wandb sync"
            )
        return WandbRecord(lambda: self._open(run, mode), warnings, self.every_s)

    def _open(self, run: RunInfo, mode: Mode) -> Any:
        import wandb

        run.run_dir.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=not self.system_metrics
        )
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=mode,
            name=run.name,
            group=self.group or run.group,
            tags=[*self.tags, *run.tags] or None,
            config=finite(dict(run.config)),
            dir=str(run.run_dir),
            reinit="create_new",
            settings=settings,
        )
        opened.define_metric("*", step_metric="step")
        return opened


def has_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
