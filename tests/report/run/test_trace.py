import json

from gpp.report.run.record import RunRecord
from gpp.report.run.trace import build_trace
from gpp.timeline import Event, Timeline
from tests.support.fake_runs import branchy_graph, plan_of, timeline_of
from tests.support.traces import check_trace


def both(run: RunRecord) -> list[tuple[str, Timeline]]:
    assert run.predicted and run.measured
    return [("predicted", run.predicted), ("measured", run.measured)]


def test_trace_is_valid(any_run: RunRecord) -> None:
    trace = json.loads(json.dumps(build_trace(both(any_run), any_run.plan), allow_nan=False))
    assert check_trace(trace) == []
    kinds = {event["ph"] for event in trace["traceEvents"]}
    assert kinds == {"X", "M", "s", "f", "C"}


def test_a_process_for_every_device_and_source(run4: RunRecord) -> None:
    assert run4.plan is not None
    trace = build_trace(both(run4), run4.plan)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert len(names) == len(set(names)) == 2 * run4.plan.num_devices
    assert "predicted d0 (s0)" in names and "measured d0 (s0)" in names


def test_arrows_go_both_ways_along_every_edge(run4: RunRecord) -> None:
    assert run4.plan is not None
    trace = build_trace([("predicted", run4.predicted)], run4.plan)  # type: ignore[list-item]
    starts = [e for e in trace["traceEvents"] if e["ph"] == "s"]
    replicas = sum(len(run4.plan.stages[b].devices) for _, b in run4.plan.edges)
    assert len(starts) == 2 * replicas * (run4.plan.minibatch_size // 4)
    finishes = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert all(e["ts"] <= finishes[e["id"]]["ts"] for e in starts)


def test_unequal_microbatches_have_arrows_too() -> None:
    graph = branchy_graph(2)
    plan, problem = plan_of(graph, microbatch=(4, 8, 4, 8, 8))  # type: ignore[arg-type]
    trace = build_trace([("predicted", timeline_of(plan, problem))], plan)
    assert check_trace(trace) == []
    assert any(e["ph"] == "s" for e in trace["traceEvents"])


def test_counter_stays_within_the_plan(run4: RunRecord) -> None:
    assert run4.plan is not None
    trace = build_trace([("predicted", run4.predicted)], run4.plan)  # type: ignore[list-item]
    for s, stage in enumerate(run4.plan.stages):
        values = [e["args"]["samples"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == f"s{s} samples in flight"]
        assert values and values[-1] == 0 and 0 < max(values) <= stage.in_flight


def test_overlapping_events_get_their_own_threads(run4: RunRecord) -> None:
    assert run4.predicted
    events = (
        Event(0, "F", 0, 0, 0.0, 1.0),
        Event(0, "F", 0, 1, 0.5, 1.5),
        Event(0, "SF", 0, 0, 0.9, 1.4, 10),
        Event(0, "SF", 0, 1, 1.0, 1.5, 10),
    )
    trace = build_trace([("measured", Timeline(source="x", metrics=run4.predicted.metrics, events=events))])
    assert check_trace(trace) == []
    assert len({e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}) == 4


def test_the_checker_sees_faults(run4: RunRecord) -> None:
    trace = build_trace([("predicted", run4.predicted)], run4.plan)  # type: ignore[list-item]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    bad = {"traceEvents": [*trace["traceEvents"], {**slices[0], "ts": slices[0]["ts"] + slices[0]["dur"] / 2}]}
    assert any("partly overlaps" in p for p in check_trace(bad))
    shifted = {"traceEvents": [{**e, "ts": 1e12} if e["ph"] == "f" else e for e in trace["traceEvents"]]}
    assert any("lies in no slice" in p for p in check_trace(shifted))
    unnamed = {"traceEvents": [e for e in trace["traceEvents"] if e["ph"] != "M"]}
    assert any("no name" in p for p in check_trace(unnamed))


def test_nothing() -> None:
    assert check_trace(build_trace([])) == []
