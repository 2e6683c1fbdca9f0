"""The records of a run: terminal, result.json, timeline, trace, metrics, report, tracker.

The contract of a run directory (docs/architecture.md) is written here and nowhere else.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml
from rich.text import Text

from gpp.analysis.comparison import Attempt, best_of
from gpp.app.experiment import Experiment
from gpp.app.pages import compared_facts, page_of, show_compared
from gpp.app.several import SEVERAL
from gpp.app.stopping import Stopped, held_back
from gpp.app.tracking import Tracking
from gpp.cost.problem import Problem
from gpp.errors import Exhausted, GppError, Infeasible, InvalidConfig, WorkerFailed
from gpp.files import LateFile, write_text
from gpp.graph.captured import Checked
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import branches
from gpp.plan.plan import Plan
from gpp.planners.bounds.lower_bound import Bound
from gpp.private import masked, masked_value
from gpp.report.run.console import SafeConsole, StepProgress
from gpp.report.run.gain_words import gain_dicts
from gpp.report.run.process import peak_memory_bytes, reset_peak_memory
from gpp.report.run.record import RunRecord
from gpp.report.run.result import Status, finite, result_dict, write_json
from gpp.report.run.terminal import show_plan, show_result
from gpp.report.run.trace import build_trace
from gpp.runtime.engine import Outcome, Progress
from gpp.runtime.run_dir import RunDir, is_locked
from gpp.serialization import to_json, write_value
from gpp.timeline import Metrics, Timeline

if TYPE_CHECKING:
    from gpp.analysis.explain.explanation import Explanation
    from gpp.analysis.explore import Explored
    from gpp.analysis.gains import Gains
    from gpp.analysis.max_batch import Boundary
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


@dataclass(slots=True, kw_only=True)
class Recorder:
    """A context manager around one run; result.json and report.html are written, whatever ends the run.

    A refused command (exit code 2) is no run: it leaves the directory as it was, and none where there was none. In a
    sweep it is a job of its own, whose row says why.

    Args:
        config: the resolved configuration, for the directory and the tracker.
        digest: hash of the configuration, by which a sweep knows its jobs.
        command: the command line that reproduces the run.
        group: the sweep's name, None outside one.
        on_start: called when the training begins.
    """

    experiment: Experiment
    directory: RunDir
    console: SafeConsole
    config: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    command: str = ""
    group: str | None = None
    on_start: Callable[[], None] = lambda: None
    exit_code: int = 0
    status: Status = "ok"
    reason: str | None = None
    plan: Plan | None = None
    graph: OpGraph | None = None
    predicted: Timeline | None = None
    outcome: Outcome = field(default_factory=Outcome)
    baseline: dict[str, Metrics] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    bound: Bound | None = None
    explanation: Explanation | None = None
    one_stage: OneStage | None = None
    gains: Gains | None = None
    checked: Checked | None = None
    attempts: tuple[Attempt, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    explored: Explored | None = None
    planning_peak_bytes: int | None = None
    answers: Mapping[str, int] | None = None
    _stack: ExitStack = field(default_factory=ExitStack)
    _tracking: Tracking = field(init=False)
    _log: MemoryHandler = field(default_factory=lambda: MemoryHandler(LOG_RECORDS, logging.CRITICAL + 1))
    _first_step: int = 0
    _losses: list[float] = field(default_factory=list)
    _evaluations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = masked_value(self.config)
        about = {"config": self.config, "group": self.group, "command": self.command, "warn": self.warn}
        self._tracking = Tracking(experiment=self.experiment, run_dir=self.run_dir, **about)

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
            if warning not in self.warnings:
                self.warnings.append(warning)
                self.console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)

    def posed(self, graph: OpGraph, bound: Bound | None) -> None:
        """Keep the graph that will be planned, and the lower bound on the time of every plan."""
        self.graph, self.bound = graph, bound

    def planned(self, plan: Plan, predicted: Timeline, baseline: tuple[Attempt, ...], one_stage: OneStage | None) -> None:
        """Show the plan and its prediction beside the baseline's, and why it is one stage, if it is."""
        self.plan, self.predicted, self.one_stage = plan, predicted, one_stage
        self.baseline = {found.strategy: found.predicted.metrics for found in baseline if found.predicted}
        self.planning_peak_bytes = peak_memory_bytes()
        show_plan(self.console, self._run())

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
        self.explanation = explanation
        if explanation is not None:
            from gpp.report.run.explain_terminal import show_explanation

            show_explanation(self.console, self._run())

    def gained(self, gains: Gains) -> None:
        """Keep what the plan gains over simpler ones, as far as that is known."""
        self.gains = gains

    def predicted_only(self, plan: Plan) -> None:
        """Write the plan of a run that no engine can carry out."""
        self.begin()
        write_value(self.run_dir / "job" / "plan.json", plan)

    def starting(self, strategy: str) -> None:
        """Say on a terminal which strategy of a comparison is searching."""
        self.pass_by(f"planning with {strategy} ...")

    def pass_by(self, words: str) -> None:
        """Say on a terminal what goes on; the next line takes its place."""
        if self.console.is_terminal:
            room = max(0, min(60, self.console.width - 1))
            self.console.print(Text(words[:room].ljust(room), style="dim"), end="\r")

    def compared(self, attempts: tuple[Attempt, ...], boundaries: tuple[Boundary, ...] = ()) -> Attempt | None:
        """Show several strategies on one problem; the best synchronous one, else the best, is the run's own, and is returned.

        With `boundaries` each attempt is one at the largest micro-batch of its strategy.

        Without any plan the run ends as its attempts did: infeasible if all attempts were infeasible.
        """
        self.attempts, self.boundaries, self.planning_peak_bytes = attempts, boundaries, peak_memory_bytes()
        best = best_of(attempts).own
        if best is not None:
            self.plan, self.predicted = best.plan, best.predicted
        else:
            failed = [found for found in attempts if found.status == "failed"]
            self.status, self.exit_code = ("failed", 1) if failed else ("infeasible", Infeasible.exit_code)
            from gpp.report.compare.strategies import reason_lines

            self.reason = "\n".join(reason_lines(failed or attempts))
        self.pass_by("")
        show_compared(self.console, self._run())
        return best

    def progress(self) -> Progress:
        """Start the trackers and the progress bar; the function returned is called while the job runs."""
        self.on_start()
        resumed = self.experiment.resumed
        self._first_step = resumed.manifest.step if resumed else 0
        self._tracking.open(steps=True, first_step=self._first_step)
        bar = self._stack.enter_context(StepProgress(self.console, total=self.experiment.num_steps))

        terms: dict[str, float] = {}

        def on_terms(values: Mapping[str, float]) -> None:
            terms.update(values)

        def on_step(step: int, loss: float | None, samples_per_s: float | None) -> None:
            self._losses += [] if loss is None else [loss]
            bar.update(step, loss, samples_per_s)
            self._tracking.step(step - 1, {"loss": loss, **terms, "samples_per_s": samples_per_s})

        def on_evaluation(values: dict[str, Any]) -> None:
            self._evaluations.append(values)
            self._tracking.evaluation(values)

        return Progress(
            on_terms=on_terms,
            on_step=on_step,
            on_evaluation=on_evaluation,
            warn=self.warn,
            say=lambda words: self.console.print(Text(words), soft_wrap=True),
        )

    def replaced(self, plan: Plan, predicted: Timeline) -> None:
        """Take the plan with which a stream went on: what is measured is measured of it."""
        self.plan, self.predicted = plan, predicted

    def answered(self, values: dict[str, float]) -> None:
        """Keep what the answers to all requests are worth."""
        if values:
            self._evaluations.append({"step": self.experiment.num_steps, **values})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        with held_back():
            if error is not None:
                self._failed(error)
            try:
                if self._refused:
                    print(f"error: {self.reason}", file=sys.stderr)
                else:
                    self.begin()
                    self._write()
            except (GppError, OSError) as problem:
                self._unwritten(problem)
            finally:
                self._stack.close()
                self._tracking.close(None if self._refused else self._run(), self.exit_code, self.reason)
                self.directory.release()
        return isinstance(error, Exception) or error is None

    @property
    def _refused(self) -> bool:
        """Whether this is no run: bad input was found before a file was written."""
        in_sweep = self.group is not None and self.directory.claimed
        return self.exit_code == InvalidConfig.exit_code and not self.directory.begun and not in_sweep

    def _failed(self, error: BaseException) -> None:
        error = Exhausted.of(error) or error
        self.status = "infeasible" if isinstance(error, Infeasible) else "failed"
        self.exit_code = error.exit_code if isinstance(error, GppError | Stopped) else 1
        self.reason = masked(str(error)) or type(error).__name__
        if isinstance(error, WorkerFailed):
            if error.traceback:
                self.console.print(Text(error.traceback.rstrip()), soft_wrap=True)
            self.console.print(Text(f"worker {error.rank} failed first; the other workers were stopped", style="bold"))
        elif no_room(error):
            self.reason = f"{self.run_dir} cannot be written: {error}. Fix: make room there, or name another directory"
            self.console.print(Text(self.reason), soft_wrap=True)
        elif not isinstance(error, GppError | Stopped):
            # This is no error of the user's: it is our own bug, and its traceback helps to find it.
            self.reason = masked(f"{type(error).__name__}: {error}")
            self.console.print(Text("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)

    def _unwritten(self, problem: Exception) -> None:
        """Say that the records could not be written; the run has failed, unless it had ended in a worse way before."""
        self.status, self.exit_code = "failed", self.exit_code or 1
        why = problem if isinstance(problem, GppError) else f"{self.run_dir} cannot be written: {problem}. Fix: make room there"
        said = [f"error: {self.reason}"] if self.reason else []
        print(*said, f"error: the run's records are not whole: {why}", sep="\n", file=sys.stderr)

    def result(self) -> dict[str, Any]:
        """result.json."""
        e, losses = self.experiment, list(self.outcome.losses) or self._losses
        num_ops = self.graph.num_ops if self.graph else None
        resumed = e.resumed if losses else None
        best = best_of(self.attempts).own
        evaluations = list(self.outcome.evaluations) or self._evaluations
        final = {name: value for name, value in (evaluations[-1] if evaluations else {}).items() if name != "step"}
        boundaries = self.boundaries if e.mode == "max_batch" else None
        several = compared_facts(self.attempts, boundaries, self.bound, num_ops) if e.mode in SEVERAL else {}
        return result_dict(
            status=self.status,
            reason=self.reason,
            configuration=self.digest,
            model=e.model.name,
            strategy=best.strategy if best else e.strategy.name,
            cluster=e.cluster.name,
            engine=e.engine.name,
            seed=e.seed,
            plan=self.plan,
            num_ops=num_ops,
            predicted=self.predicted.metrics if self.predicted else None,
            measured=self.outcome.measured.metrics if self.outcome.measured else None,
            loss=losses,
            loss_terms=self.outcome.terms,
            final_metric={name.removeprefix("metric:"): value for name, value in final.items()},
            bound=self.bound if best is None or best.bounded else None,
            order=self.explanation.order if self.explanation else None,
            **several,
            planning_peak_bytes=self.planning_peak_bytes,
            resumed=None if resumed is None else {"step": resumed.manifest.step, "checkpoint": str(resumed.folder)},
            idle_s=self.explanation.idle_s if self.explanation else None,
            emulation=self.outcome.emulation,
            versions=self.outcome.versions,
            replaced=self.outcome.replaced,
            gains=gain_dicts(self.gains) if self.gains else (),
            answers=self.answers,
            checked=self.checked,
        )

    def _run(self) -> RunRecord:
        return RunRecord(
            result=self.result(),
            plan=self.plan,
            graph=self.graph,
            cluster=self.experiment.cluster,
            branches=branches(self.graph) if self.graph else (),
            predicted=self.predicted,
            measured=self.outcome.measured,
            losses=list(self.outcome.losses) or self._losses,
            first_step=self._first_step,
            evals=list(self.outcome.evaluations) or self._evaluations,
            warnings=tuple(self.warnings),
            command=self.command,
            baseline_predicted=self.baseline,
            bound=self.bound,
            explanation=self.explanation,
            one_stage=self.one_stage,
            gains=self.gains,
            compared=self.attempts,
            boundaries=self.boundaries,
            explored=self.explored,
            emulation=self.outcome.emulation,
        )

    def _write(self) -> None:
        run = self._run()
        write_json(self.run_dir / "result.json", run.result)
        for found in run.compared:
            if found.plan is not None:
                write_value(self.run_dir / "plans" / f"{found.strategy}.json", found.plan)
        if run.explanation is not None:
            write_text(self.run_dir / "explanation.json", to_json(run.explanation))
        timelines = Timelines(predicted=self.predicted, measured=self.outcome.measured)
        write_text(self.run_dir / "timeline.json", to_json(timelines))
        both = (("predicted", self.predicted), (run.source, self.outcome.measured))
        named = [(source, timeline) for source, timeline in both if timeline]
        write_json(self.run_dir / "trace.json", build_trace(named, self.plan), indent=None)
        write_text(self.run_dir / "report.html", page_of(run))
        self._tracking.open(steps=False)
        hints = self._tracking.tell(run, page=self.run_dir / "report.html", files=[self.run_dir / "trace.json"])
        self._stack.close()
        paths = [(Path(name).stem, self.run_dir / name) for name in ("report.html", "trace.json", "result.json")]
        show_result(self.console, self._run(), [(name, os.path.relpath(path)) for name, path in paths], hints)
