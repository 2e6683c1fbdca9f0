import io
import re
from dataclasses import replace

import pytest

from gpp.analysis.comparison import Status
from gpp.app.tracked import devices_table
from gpp.report.run.console import make_console
from gpp.report.run.page import run_report
from gpp.report.run.record import RunRecord
from gpp.report.run.terminal import show_result
from gpp.report.sweep.files import summarise
from gpp.report.sweep.jobs import SweepJob
from gpp.report.sweep.page import sweep_report
from gpp.report.sweep.terminal import results_table
from gpp.timeline import Emulation, Event, Timeline
from tests.support.fake_runs import make_run, unplanned_run
from tests.support.page_check import parse


def test_page_is_well_formed_and_complete(any_run: RunRecord) -> None:
    page = run_report(any_run)
    parsed = parse(page)
    text = " ".join(parsed.words)
    for heading in (
        "Stage graph",
        "Timelines",
        "Memory per device",
        "Training",
        "Stages",
        "Beside other strategies",
        "Warnings",
        "How to reproduce",
    ):
        assert heading in text
    assert '"name":"Predicted"' in page and '"name":"Measured"' in page and "python run.py model=towers" in text
    assert page.count("<svg") >= 6


def test_every_stage_is_drawn_and_tabled(run4: RunRecord) -> None:
    text = " ".join(parse(run_report(run4)).words)
    assert run4.plan is not None
    for s in range(len(run4.plan.stages)):
        assert f"s{s}" in text
    assert "branches.0.layers.0-1" in text and "1.60 MB" in text


@pytest.mark.parametrize(
    ("status", "reason"), [("infeasible", "stage 3 needs 2e9 bytes < & >"), ("failed", "worker 1 failed:\nTraceback ...")]
)
def test_a_run_without_a_plan_says_why(status: Status, reason: str) -> None:
    parsed = parse(run_report(unplanned_run(status, reason)))
    text = " ".join(parsed.words)
    assert status in text and reason.splitlines()[0] in text
    assert "trace.json" not in text  # it has no event


def test_only_predicted() -> None:
    run = make_run(4, measured=False)
    page = run_report(run.knowing(losses=(), evaluations=(), warnings=(), graph=None))
    assert '"name":"Predicted"' in page and '"name":"Measured"' not in page and "Warnings" not in parse(page).words


def test_what_is_emulated_is_not_called_measured(run4: RunRecord) -> None:
    """On the page, in its drawings, in the terminal, in what trackers are told, and in the tables of sweeps."""
    emulation = Emulation(time_scale=1.0, virtual_iteration_s=1.0, step_s=(1.0, 1.1), unpaced_s=0.1)
    run = run4.knowing(warnings=(), emulation=emulation, engine="emulate")
    page = run_report(run)
    assert '"name":"Emulated"' in page and "Emulated: by the virtual clock" in page and "emulated" in parse(page).words
    console = make_console(file := io.StringIO(), width=160)
    show_result(console, run)
    console.print(results_table([run.result]))
    console.print(results_table([run.result, run4.result]))
    assert "measured or emulated" in file.getvalue()
    assert not [line for line in file.getvalue().splitlines() if "measured" in line.replace("measured or emulated", "")]
    job = SweepJob(name="0", overrides={}, result=run.result, has_report=False)
    sweep = sweep_report([job], summarise([job]), "a sweep")
    assert "emulated / predicted" in sweep
    for text in (page, sweep):
        assert not [word for word in parse(text).words if re.search("measured", word, re.I)]
    assert any("emulated" in column for column in devices_table(run).columns)


def test_text_of_the_user_is_escaped(run4: RunRecord) -> None:
    page = run_report(run4.knowing(command="python run.py model='<b>'", warnings=("<script>alert(1)</script>",)))
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    parse(page)


def test_losses_that_are_not_finite(run4: RunRecord) -> None:
    parse(run_report(run4.knowing(losses=[1.0, float("nan"), None, 2.0], evaluations=[{"step": 0, "accuracy": float("nan")}])))  # type: ignore[list-item]
    parse(run_report(run4.knowing(losses=[float("nan")] * 3)))
    assert "training loss over time" not in run_report(run4.knowing(losses=[2.0]))  # one loss is no course
    parse(run_report(run4.knowing(losses=[1.0] * 20_000)))


def test_no_name_of_the_user_ends_the_data_of_a_page() -> None:
    """Operators' names are in scripts, where HTML has no escapes."""
    run = make_run(4)
    assert run.graph is not None
    ops = (replace(run.graph.ops[0], name="</script><b>x"), *run.graph.ops[1:])
    page = run_report(run.knowing(graph=replace(run.graph, ops=ops)))
    assert page.count("</script>") == len(re.findall("<script", page)) == 3
    parse(page)


def test_thousands_of_events_make_a_small_page() -> None:
    run = make_run(4, measured=False, per_branch=4, trunk_devices=16, microbatch=16, minibatch=64)
    plan, predicted = run.plan, run.predicted
    assert plan is not None and predicted is not None
    events = tuple(
        Event(d, kind, s, m, (2 * m + (kind == "B")) * 1e-3, (2 * m + (kind == "B") + 0.9) * 1e-3)
        for d, s in plan.stage_of_device.items()
        for m in range(512)
        for kind in ("F", "B")
    )
    timeline = Timeline(source="simulate", events=events, metrics=replace(predicted.metrics, iteration_s=1.024))
    assert plan.num_devices == 32
    page = run_report(run.knowing(predicted=timeline, measured=timeline))
    assert len(page) < 250_000
    parse(page)


def test_terms_of_a_loss_are_drawn_beside_their_sum(run4: RunRecord) -> None:
    halves = tuple(value / 2 for value in run4.outcome.losses)
    run = run4.knowing(terms={"loss:contrastive": halves, "loss:caption": halves})
    assert {"training loss", "contrastive", "caption"} <= set(parse(run_report(run)).words)
    assert "caption" not in parse(run_report(run4)).words
