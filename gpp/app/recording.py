"""The records of a run: terminal, result.json, timeline, trace, metrics, report, tracker.

The contract of a run directory (docs/run_directory.md) is written here and nowhere else.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml
from rich.text import Text

from gpp.analysis.comparison import Attempt, best_of
from gpp.app.experiment import Experiment
from gpp.app.several import SEVERAL
from gpp.app.stopping import Stopped, check, held_back
from gpp.app.tracking import Tracking
from gpp.cost.problem import Problem
from gpp.errors import Exhausted, GppError, Infeasible, InvalidConfig, WorkerFailed
from gpp.files import LateFile, write_text
from gpp.plan.plan import Plan
from gpp.private import masked, masked_value
from gpp.report.run.console import SafeConsole, StepProgress
from gpp.report.run.record import Asked, Planned, Resumed, RunRecord, Surveyed
from gpp.report.run.result import finite, peak_memory_bytes, reset_peak_memory, write_json
from gpp.report.run.terminal import show_plan, show_result
from gpp.report.run.trace import build_trace
from gpp.runtime.engine import Progress
from gpp.runtime.run_dir import RunDir, is_locked
from gpp.serialization import to_json, write_value
from gpp.timeline import Outcome, Timeline

if TYPE_CHECKING:
    from gpp.analysis.explain.explanation import Explanation
    from gpp.analysis.max_batch import LargestMicrobatch
    from gpp.analysis.one_stage import OneStage

LOG_RECORDS = 1000
"""Records of Python's own logging that are kept in memory before they are written to run.log."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def no_room(error: BaseException) -> bool:
    """Whether a file could not be written because of its disk; safetensors says so in words only."""
    return getattr(error, "errno", None) in NO_ROOM or any(f"(os error {number})" in str(error) for number in NO_ROOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """timeline.json: the predicted and the measured timeline."""

    predicted: Timeline | None
    measured: Timeline | None


class Recorder:
    """A context manager around one run; result.json and report.html are written, whatever ends the run.

    A refused command (exit code 2) is no run: it leaves the directory as it was, and none where there was none. In a
    sweep it is a job of its own, whose row says why.

    Args:
        config: the resolved configuration, for the directory and the tracker.
        digest: hash of the configuration, by which a sweep knows its jobs.
        group: the sweep's name, None outside one.
        on_start: called when the training begins.
    """

    def __init__(
        self,
        *,
        experiment: Experiment,
        directory: RunDir,
        console: SafeConsole,
        config: Mapping[str, Any] | None = None,
        digest: str | None = None,
        group: str | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.experiment, self.directory, self.console, self.group, self.on_start = experiment, directory, console, group, on_start
        self.config, self.exit_code = masked_value(config or {}), 0
        self._stack = ExitStack()
        self._tracking = Tracking(experiment, directory, config=self.config, group=group, warn=self.warn)
        self._log = MemoryHandler(LOG_RECORDS, logging.CRITICAL + 1)
        self._losses, self._evaluations = list[float](), list[dict[str, Any]]()
        e, boundaries = experiment, () if experiment.mode == "max_batch" else None
        names = {"model": e.model.name, "cluster": e.cluster.name, "engine": e.engine.name}
        self.run = RunRecord(
            asked=Asked.of(e.strategy, e.times, **names, seed=e.seed, configuration=digest, command=directory.command),
            planned=Planned(cluster=e.cluster),
            survey=Surveyed(boundaries=boundaries) if e.mode in SEVERAL else None,
        )

    def know(self, **facts: Any) -> None:
        """Put facts into the record, by name (`RunRecord.knowing`)."""
        check()
        self.run = self.run.knowing(**facts)

    @property
    def run_dir(self) -> Path:
        return self.directory.path

    def __enter__(self) -> Self:
        reset_peak_memory()
        self.console.heard = self._tracking.heard
        logging.getLogger().addHandler(self._log)
        logging.getLogger().setLevel(logging.INFO)
        self._stack.callback(self._log.close)
        self._stack.callback(logging.getLogger().removeHandler, self._log)
        return self

    def claim(self) -> None:
        """Keep other runs out of the directory, and say which run this one goes on from.

        Raises:
            InvalidConfig: another run is under way there, or the directory cannot be written.
        """
        found = None if self.directory.claimed else self.experiment.resumed
        if found is not None:
            self.console.print(Text(found.words), soft_wrap=True)
            if is_locked(source := found.folder.parent.parent):
                self.warn(f"{source} is still under way: it may remove the checkpoint before this run has read it")
        with held_back():  # raised between the lock and the note of it, a signal would have this run find itself in its own way
            self.directory.claim(found and found.folder, found.manifest.step if found else 0)

    def begin(self) -> None:
        """All checks have passed: take the directory over."""
        self.claim()
        self.directory.begin(joins=self.experiment.engine.joins)
        if self._log.target is None:
            self._log.setTarget(logging.StreamHandler(LateFile(self.run_dir / "run.log")))
        write_text(self.run_dir / "config.yaml", yaml.safe_dump(finite(dict(self.config)), sort_keys=False, allow_unicode=True))

    def warn(self, *warnings: str) -> None:
        """Print warnings at once, beside what they are about; the report has them, too."""
        for warning in warnings:
            if warning not in self.run.warnings:
                self.know(warnings=(*self.run.warnings, warning))
                self.console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)

    def planned(self, plan: Plan, predicted: Timeline, baseline: tuple[Attempt, ...], one_stage: OneStage | None) -> None:
        """Show the plan and its prediction beside the baseline's, and why it is one stage, if it is."""
        others = {found.strategy: found.predicted.metrics for found in baseline if found.predicted}
        self.know(plan=plan, predicted=predicted, one_stage=one_stage, baseline=others, peak_bytes=peak_memory_bytes())
        show_plan(self.console, self.run)

    def profiled(self, problem: Problem, plan: Plan) -> None:
        """Show what was measured on this machine, and write it in PipeEdge's files, too."""
        from gpp.cost.models.profiled import Profiled
        from gpp.formats.pipeedge.written import measured_files
        from gpp.report.run.profile import show_profile

        show_profile(self.console, problem, plan)
        if isinstance(problem.cost, Profiled):
            self.begin()
            for name, text in measured_files(problem, self.experiment.model.name, plan.stages[0].samples).items():
                write_text(self.run_dir / "pipeedge" / name, text)

    def explained(self, explanation: Explanation | None) -> None:
        """Show the explanation of the plan's time."""
        self.know(explanation=explanation)
        if explanation is not None:
            from gpp.report.run.explain_terminal import show_explanation

            show_explanation(self.console, self.run)

    def exported(self, engine: str, folder: Path, command: str) -> None:
        """Say where a plan for another engine is, and what starts it there."""
        where = os.path.relpath(folder)
        self.console.print(Text(f"for {engine}: {where}/PLAN.md\n  cd {where} && {command}"), soft_wrap=True)

    def predicted_only(self, plan: Plan) -> None:
        """Write the plan of a run that no engine can carry out."""
        self.begin()
        write_value(self.run_dir / "job" / "plan.json", plan)

    @property
    def aside(self) -> Progress:
        """For work that is not the run's own: what goes on is passed by, and warnings stay."""
        return Progress(say=self.console.pass_by, warn=self.warn)

    def compared(self, attempts: tuple[Attempt, ...], boundaries: tuple[LargestMicrobatch, ...] = ()) -> Attempt | None:
        """Show several strategies on one problem; the best synchronous one, else the best, is the run's own, and is returned.

        With `boundaries` each attempt is one at the largest micro-batch of its strategy.

        Without any plan the run ends as its attempts did: infeasible if all attempts were infeasible.
        """
        self.know(attempts=attempts, boundaries=boundaries or self.run.boundaries or None, peak_bytes=peak_memory_bytes())
        best = best_of(attempts).own
        if best is not None:
            self.know(plan=best.plan, predicted=best.predicted)
        else:
            failed = [found for found in attempts if found.status == "failed"]
            from gpp.report.run.strategies import reason_lines

            status, self.exit_code = ("failed", 1) if failed else ("infeasible", Infeasible.exit_code)
            self.know(status=status, reason="\n".join(reason_lines(failed or attempts)))
        self.console.pass_by("")
        show_compared(self.console, self.run)
        return best

    def progress(self) -> Progress:
        """Start the trackers and the progress bar; the function returned is called while the job runs."""
        self.on_start()
        resumed = self.experiment.resumed
        self.know(resumed=Resumed(resumed.manifest.step, str(resumed.folder)) if resumed else None)
        self._tracking.open(steps=True, first_step=self.run.first_step)
        one = self.run.predicted.metrics.one if self.run.predicted else "step"
        bar = self._stack.enter_context(StepProgress(self.console, total=self.experiment.num_steps, one=one))

        terms: dict[str, float] = {}

        def on_step(step: int, loss: float | None, samples_per_s: float | None) -> None:
            check()
            self._losses += [] if loss is None else [loss]
            bar.update(step, loss, samples_per_s)
            self._tracking.step(step - 1, {"loss": loss, **terms, "samples_per_s": samples_per_s})

        def on_evaluation(values: dict[str, Any]) -> None:
            self._evaluations.append(values)
            self._tracking.evaluation(values)

        return Progress(
            on_terms=terms.update,
            on_step=on_step,
            on_evaluation=on_evaluation,
            warn=self.warn,
            say=lambda words: self.console.print(Text(words), soft_wrap=True),
        )

    def measured(self, outcome: Outcome) -> None:
        """Take what the engine measured."""
        self.know(outcome=replace(outcome, answers=self.run.outcome.answers))

    def answered(self, values: dict[str, float]) -> None:
        """Keep what the results of a run that trains nothing are worth."""
        if values:
            self._evaluations.append({"step": self.experiment.num_steps, **values})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        with held_back():
            if error is not None:
                self._failed(error)
            # Of a run that did not come to its end the steps that it has told.
            known = self.run.outcome
            self.know(losses=known.losses or tuple(self._losses), evaluations=known.evaluations or tuple(self._evaluations))
            try:
                if self._refused:
                    print(f"error: {self.run.reason}", file=sys.stderr)
                else:
                    self.begin()
                    self._write()
            except (GppError, OSError) as problem:
                self._unwritten(problem)
            finally:
                self._stack.close()
                self._tracking.close(None if self._refused else self.run, self.exit_code, self.run.reason)
                self.directory.release()
        return isinstance(error, Exception) or error is None

    @property
    def _refused(self) -> bool:
        """Whether this is no run: bad input was found before a file was written."""
        in_sweep = self.group is not None and self.directory.claimed
        return self.exit_code == InvalidConfig.exit_code and not self.directory.begun and not in_sweep

    def _failed(self, error: BaseException) -> None:
        error = Exhausted.of(error) or error
        self.exit_code = error.exit_code if isinstance(error, GppError | Stopped) else 1
        reason = masked(str(error)) or type(error).__name__
        if isinstance(error, WorkerFailed):
            if error.traceback:
                self.console.print(Text(error.traceback.rstrip()), soft_wrap=True)
            self.console.print(Text(f"worker {error.rank} failed first; the other workers were stopped", style="bold"))
        elif no_room(error):
            reason = f"{self.run_dir} cannot be written: {error}. Fix: make room there, or name another directory"
            self.console.print(Text(reason), soft_wrap=True)
        elif not isinstance(error, GppError | Stopped):
            # This is no error of the user's: it is our own bug, and its traceback helps to find it.
            reason = masked(f"{type(error).__name__}: {error}")
            self.console.print(Text("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)
        self.know(status="infeasible" if isinstance(error, Infeasible) else "failed", reason=reason)

    def _unwritten(self, problem: Exception) -> None:
        """Say that the records could not be written; the run has failed, unless it had ended in a worse way before."""
        self.exit_code = self.exit_code or 1
        self.know(status="failed")
        why = problem if isinstance(problem, GppError) else f"{self.run_dir} cannot be written: {problem}. Fix: make room there"
        said = [f"error: {self.run.reason}"] if self.run.reason else []
        print(*said, f"error: the run's records are not whole: {why}", sep="\n", file=sys.stderr)

    def _write(self) -> None:
        run, planned, measured = self.run, self.run.planned, self.run.outcome.measured
        write_json(self.run_dir / "result.json", run.result)
        for found in run.attempts:
            if found.plan is not None:
                write_value(self.run_dir / "plans" / f"{found.strategy}.json", found.plan)
        if run.judged.explanation is not None:
            write_text(self.run_dir / "explanation.json", to_json(run.judged.explanation))
        timelines = Timelines(predicted=planned.predicted, measured=measured)
        write_text(self.run_dir / "timeline.json", to_json(timelines))
        both = (("predicted", planned.predicted), (run.source, measured))
        named = [(source, timeline) for source, timeline in both if timeline]
        write_json(self.run_dir / "trace.json", build_trace(named, planned.plan), indent=None)
        write_text(self.run_dir / "report.html", page_of(run))
        self._tracking.open(steps=False)
        hints = self._tracking.tell(run, page=self.run_dir / "report.html", files=[self.run_dir / "trace.json"])
        self._stack.close()
        names = ("report.html", *(("trace.json",) if named else ()), "result.json")
        paths = [(Path(name).stem, self.run_dir / name) for name in names]
        show_result(self.console, self.run, [(name, os.path.relpath(path)) for name, path in paths], hints)


def page_of(run: RunRecord) -> str:
    """report.html of a run."""
    if run.attempts:
        from gpp.report.compare.page import compare_report

        return compare_report(run)
    from gpp.report.run.page import run_report

    return run_report(run)


def show_compared(console: SafeConsole, run: RunRecord) -> None:
    """Show several strategies, or the largest micro-batch of each where those were looked for."""
    if run.boundaries:
        from gpp.report.compare.boundaries import show_boundaries

        show_boundaries(console, run)
        return
    from gpp.report.compare.terminal import show_comparison

    show_comparison(console, run)
