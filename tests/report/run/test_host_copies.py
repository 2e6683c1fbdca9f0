"""Copies to the host in pages and traces, and memory over a step."""

from dataclasses import replace

import pytest

from gpp.mechanisms.marks.stage import marked
from gpp.report.draw.memory import memory_levels
from gpp.report.run.page import run_report
from gpp.report.run.record import Asked, Planned, RunRecord
from gpp.report.run.stages import stage_lines
from gpp.report.run.trace import build_trace
from gpp.simulate.simulator import simulate
from tests.program.test_waits import random_case
from tests.support.host import hosted, on_host
from tests.support.page_check import parse
from tests.support.traces import check_trace


def hosted_run(recompute: bool = False) -> RunRecord:
    program, plan, problem = hosted(4, 8, 0.5)
    if recompute:
        plan = replace(plan, stages=(*plan.stages[:3], marked(plan.stages[3], recompute=(3,))))
    predicted = simulate(program, plan, problem)
    planned = Planned(plan=plan, graph=problem.graph, cluster=problem.cluster, predicted=predicted)
    return RunRecord(asked=Asked(model="m"), planned=planned)


def test_copies_have_tracks_and_threads_of_their_own() -> None:
    run = hosted_run()
    assert run.predicted is not None
    page = run_report(run)
    words = parse(page).words
    assert words.count("copy to the host") == words.count("fetch from the host") == 1
    assert "Memory over the same time" in page
    assert "copy to the host" not in run_report(run.knowing(predicted=simulate(*_kept())))
    trace = build_trace([("predicted", run.predicted)], run.plan)
    assert check_trace(trace) == []
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert threads.count("copy to the host") == threads.count("fetch from the host") == 2


def test_the_legend_names_what_the_timeline_has() -> None:
    run = hosted_run()
    assert run.predicted is not None
    assert "weight gradient" not in run_report(run)
    split = [event._replace(kind="W") if event.kind == "B" else event for event in run.predicted.events]
    assert "weight gradient" in run_report(run.knowing(predicted=replace(run.predicted, events=tuple(split))))


def _kept():
    program, plan, problem = hosted(4, 8, 0.5)
    own = {device: tuple(a for a in own if a.kind not in "OP") for device, own in program.actions.items()}
    return replace(program, actions=own), replace(plan, stages=tuple(marked(s, offload=()) for s in plan.stages)), problem


def test_stages_say_what_is_not_kept_and_what_it_costs() -> None:
    """A copy of a byte takes 0.5 s, a forward 1 s, which a backward that computes it again takes longer."""
    lines = [line.operators for line in stage_lines(hosted_run(recompute=True))]
    assert lines == ["1 on host (500 ms)", "1 on host (500 ms)", "", "1 recomputed (1.00 s)"]


@pytest.mark.parametrize("host", [None, on_host])
def test_memory_over_a_step_comes_up_to_the_peak_and_back(host) -> None:
    """Against the formula of the plan: without copies, where a device has one stage, the highest level is the predicted peak."""
    for seed in range(20):
        program, plan, problem = random_case(seed, host)
        timeline = simulate(program, plan, problem)
        levels = memory_levels(timeline, plan.stages_of_device)
        for device, own in levels.items():
            peak = timeline.metrics.peak_memory_bytes[device]
            most = max(level.total for level in own)
            assert most <= peak + 1
            if host is None and len(plan.stages_of_device[device]) == 1:
                assert most == pytest.approx(peak, abs=1), (seed, device)
            assert own[-1].kept == pytest.approx(0) and own[-1].transient == pytest.approx(0)
