"""Weights & Biases, offline (without an account) unless the user says otherwise.

`import wandb` takes a second, so it waits for `start`. Nothing here asks, prints or ends a run.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlparse

from gpp.files import folder
from gpp.loggers.back_end import BackEndRecord, from_here, need, prefixed
from gpp.loggers.base import AbstractLogger, AbstractRecord, End, RunInfo
from gpp.private import masked
from gpp.report.run.result import finite
from gpp.settings import NotNegative, Positive, settings

Mode = Literal["offline", "online", "disabled"]


class WandbRecord(BackEndRecord):
    """One wandb run.

    Args:
        every_s, alert: see `Wandb`.
        name: of the run, for the alert.
    """

    back_end: ClassVar[str] = "wandb"

    def __init__(
        self,
        open_run: Callable[[], Any],
        warnings: Sequence[str] = (),
        *,
        every_s: float = 0.0,
        alert: bool = False,
        name: str = "",
    ) -> None:
        self._every_s, self._alert, self._name = every_s, alert, name
        self._logged, self._held = -math.inf, dict[str, float]()
        super().__init__(open_run, warnings)

    def _where(self, run: Any) -> tuple[str, ...]:
        own = Path(run.settings.sync_dir)
        latest = own.with_name("latest-run")
        path = from_here(latest if latest.resolve() == own.resolve() else own)
        look = "# look at the run in this terminal, or upload it with an account:", f"wandb leet {path}", f"wandb sync {path}"
        return look if run.offline else (look[1], f"online: {run.url}")

    def _abandon(self, run: Any) -> None:
        run.finish(exit_code=1)

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
        self._try("log_eval", lambda run: run.log({"step": step, **prefixed("eval", values)}))

    def log_console(self, words: str) -> None:
        self._try("log_console", lambda run: run.write_logs(words))

    def log_page(self, name: str, path: Path) -> None:
        self._try("log_page", lambda run: self._log_html(run, name, Path(path).read_text(encoding="utf-8")))

    def log_drawing(self, name: str, svg: str) -> None:
        # wandb.Image takes pixels only; a page shows the drawing as sharp as it is, and its tooltips.
        page = f'<!doctype html><meta charset="utf-8"><title>{name}</title><body style="margin:0">{svg}</body>'
        self._try("log_drawing", lambda run: self._log_html(run, name, page))

    @staticmethod
    def _log_html(run: Any, name: str, page: str) -> None:
        import wandb

        run.log({name: wandb.Html(page, inject=False)})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def action(run: Any) -> None:
            import wandb

            # A column of numbers has words where a value is infinite, or none.
            table = wandb.Table(columns=list(columns), data=finite([list(row) for row in rows]), allow_mixed_types=True)
            run.log({name: table})

        self._try("log_table", action)

    def log_file(self, path: Path) -> None:
        def action(run: Any) -> None:
            import wandb

            artifact = wandb.Artifact(f"{run.id}-{Path(path).name}", type="run-file")
            artifact.add_file(str(path))
            run.log_artifact(artifact)

        self._try("log_file", action)

    def finish(self, summary: Mapping[str, Any] | None = None, end: End | None = None) -> None:
        self._flush()
        end = end or End()

        def action(run: Any) -> None:
            if summary:
                run.summary.update(finite(dict(summary)))
            if self._alert and end.exit_code:
                run.alert(f"{self._name} failed"[:64], end.reason or f"exit code {end.exit_code}", level="ERROR")
            run.finish(exit_code=end.exit_code)

        self._try("finish", action)
        self._run = None


@settings("logger.wandb")
class Wandb(AbstractLogger):
    """A wandb run in the run directory.

    Args:
        project, entity: as in wandb.
        mode: `offline` (files only, upload them later), `online` (needs a key; without one, and where the server does not answer,
            it stays offline and says so), `disabled`.
        group: name of the group; None takes the sweep's name.
        job_type: None takes what the run does: `train`, `plan`, `compare`, `sweep`, ...
        tags: further tags besides the run's own.
        alert: whether a run that fails sends an alert, as by e-mail or Slack.
        system_metrics: whether to sample load and memory of the machine every 15 s.
        every_s: seconds between two steps that are logged; the last one always is. metrics.jsonl has all of them. A point takes
            wandb's processes a millisecond or two, which workers on the same cores lack.
        start_s, finish_s: most seconds to wait for the server at the start, and for uploads at the end; what is not
            uploaded stays on the disk for `wandb sync`.
    """

    project: str = "gpp"
    entity: str | None = None
    mode: Mode = "offline"
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    alert: bool = False
    system_metrics: bool = True
    every_s: NotNegative = 0.5
    start_s: Positive = 30.0
    finish_s: Positive = 300.0

    def check(self) -> None:
        if self.mode != "disabled":
            need("wandb", "run pip install wandb")

    def start(self, run: RunInfo) -> AbstractRecord:
        if self.mode == "disabled":
            return AbstractRecord()
        options = {"every_s": self.every_s, "alert": self.alert, "name": run.name}
        if self.mode == "offline":
            return WandbRecord(lambda: self._open(run, "offline"), **options)
        why = "there is no wandb key. Run `wandb login` once, then upload with wandb sync"
        if has_key():
            record = WandbRecord(lambda: self._open(run, "online"), **options)
            if not record.warnings:
                return record
            why = f"{record.warnings[0].splitlines()[0]}. Upload with wandb sync when the server answers"
        warnings = (f"logger.wandb.mode=online, but recorded offline: {why}",)
        return WandbRecord(lambda: self._open(run, "offline"), warnings, **options)

    def _open(self, run: RunInfo, mode: Mode) -> Any:
        # wandb would report its own errors and timings to its makers, and load what that takes.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb
        from wandb.sdk.wandb_run import Run

        # It would load wandb's launcher, half a second, to apply inputs that nobody has staged in this process.
        if "wandb.sdk.launch.inputs.internal" not in sys.modules and hasattr(Run, "_detect_and_apply_job_inputs"):
            Run._detect_and_apply_job_inputs = lambda self: None
        folder(run.run_dir / "wandb")  # in which wandb makes all that it writes
        settings = wandb.Settings(
            silent=True,
            console="off",
            # wandb's own look at git would keep the remote's address and a patch of the user's changes.
            disable_git=True,
            git_commit=run.commit,
            disable_code=True,
            x_disable_stats=not self.system_metrics,
            init_timeout=self.start_s,
            finish_timeout=self.finish_s,
        )
        facts = {key: value for key, value in run.facts.items() if value is not None}
        with masked_words():
            opened = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=mode,
                name=run.name,
                group=self.group or run.group,
                job_type=self.job_type or run.kind,
                tags=[*self.tags, *run.tags] or None,
                config=finite({**run.config, **facts}),
                dir=str(run.run_dir),
                reinit="create_new",
                settings=settings,
            )
        opened.define_metric("*", step_metric="step")
        return opened


@contextmanager
def masked_words() -> Iterator[None]:
    """wandb takes the command line from `sys.argv`."""
    words, sys.argv = sys.argv, list(map(masked, sys.argv))
    try:
        yield
    finally:
        sys.argv = words


def has_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
