import io
from dataclasses import replace

import pytest
from rich.console import Console

from gpp.analysis.comparison import Status
from gpp.report.run.console import PIPE_WIDTH, SafeConsole, StepProgress, make_console
from gpp.report.run.key_figures import key_figures
from gpp.report.run.record import RunRecord
from gpp.report.run.terminal import show_plan, show_result
from gpp.report.sweep.terminal import results_table
from gpp.timeline import Serving
from tests.support.fake_runs import unplanned_run


def printed(width: int, *shows: object) -> str:
    file = io.StringIO()
    console = make_console(file, width=width)
    for show in shows:
        show(console)  # type: ignore[operator]
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_plan_and_result_fit(any_run: RunRecord, width: int) -> None:
    out = printed(width, lambda c: show_plan(c, any_run), lambda c: show_result(c, any_run))
    assert max(map(len, out.splitlines())) <= width
    assert "\x1b" not in out and "…" not in out.split("• searched")[0]
    for word in (
        "s0",
        "d0",
        "in flight",
        "65.6 MB",
        "as fast as sequential",
        "iteration time",
        "throughput",
        "bubble",
        "accuracy 0.9730",
    ):
        assert word in out
    if width == 160:
        assert "branches.0.layers.0-1" in out and "of limit" in out


def test_paths_are_never_broken(run4: RunRecord) -> None:
    path = "/a/very/long/path" * 12
    out = printed(80, lambda c: show_result(c, run4, [("report", path)], [f"wandb sync {path}"]))
    assert f"report  {path}\n" in out and f"wandb sync {path}\n" in out


@pytest.mark.parametrize("status", ["infeasible", "failed"])
def test_the_reason_is_said(status: Status) -> None:
    run = unplanned_run(status, "stage 3 [needs] more")
    out = printed(80, lambda c: show_plan(c, run), lambda c: show_result(c, run))
    assert f"{status}: stage 3 [needs] more" in out


@pytest.mark.parametrize("width", [80, 160])
def test_comparison(run4: RunRecord, width: int) -> None:
    slow = {**run4.result, "strategy": "sequential"}
    slow["measured"] = {**slow["measured"], "iteration_s": 2 * slow["measured"]["iteration_s"]}
    bad = {
        **run4.result,
        "strategy": "piper",
        "status": "infeasible",
        "reason": "stage 3 needs more",
        "plan": None,
        "predicted": None,
        "measured": None,
    }
    lost = {"status": "failed", "reason": "no result.json"}
    out = printed(width, lambda c: c.print(results_table([run4.result, slow, bad, lost], width)))
    assert max(map(len, out.splitlines())) <= width
    assert "2.00×" in out and "1.00×" in out and "infeasible: stage 3" in out and "failed: no result.json" in out


def test_colours_follow_no_color(run4: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured() -> str:
        file = io.StringIO()
        show_result(Console(file=file, width=100, force_terminal=True), run4.knowing(status="failed"))
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31m" in coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in coloured()


def test_what_goes_on_is_overwritten_and_unheard() -> None:
    file, heard = io.StringIO(), list[str]()
    console = SafeConsole(file=file, width=80, force_terminal=True, color_system=None)
    console.heard = heard.append
    console.pass_by("planning ...")
    console.print("planned")
    assert file.getvalue() == f"{'planning ...':<60}\rplanned\n" and heard == ["planned\n"]


def test_figures_of_requests_are_told_by_the_request(run4: RunRecord) -> None:
    assert run4.predicted is not None
    seconds = dict.fromkeys(("requests_per_s", "mean_s", "median_s", "p95_s", "p99_s"), 1.0)
    served = Serving(buffers=1, requests=9, arrival_rate=None, **seconds)
    found = key_figures(replace(run4.predicted.metrics, serving=served), None)
    assert [figure.name for figure in (found[0], found[-1])] == ["time per request", "communication per request"]


def test_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console(io.StringIO()).width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "90")
    assert make_console(io.StringIO()).width == 90


def test_progress_without_a_terminal_prints_few_lines() -> None:
    file = io.StringIO()
    with StepProgress(make_console(file, width=100), 1000, every_s=60.0) as progress:
        for step in range(1, 1001):
            progress.update(step, loss=1 / step, samples_per_s=123.4)
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("step 1000/1000  loss 0.001000  in ")


def test_progress_says_the_last_step_on_an_exception() -> None:
    file = io.StringIO()
    with pytest.raises(RuntimeError), StepProgress(make_console(file, width=100), 10, one="request") as progress:
        progress.update(3, loss=None)
        raise RuntimeError
    assert "request 3/10" in file.getvalue()


def test_progress_bar_in_a_terminal() -> None:
    file = io.StringIO()
    with StepProgress(Console(file=file, force_terminal=True, width=80), 10) as progress:
        progress.update(10, loss=0.5, samples_per_s=9.0)
    assert "10/10" in file.getvalue() and "loss 0.5000" in file.getvalue()
