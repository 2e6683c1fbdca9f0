"""The table and the page of a comparison, and the explanation's section and text."""

import io
from dataclasses import replace

import pytest

from gpp import Even, GraphPipe, OneFOneB, Sequential, Strategy
from gpp.analysis.comparison import Attempt, best_of
from gpp.analysis.explain.explanation import explain
from gpp.analysis.max_batch import LargestMicrobatch
from gpp.cost.models.profiled import GraphProfile, Profiled, cpu_setting
from gpp.errors import GppError
from gpp.mechanisms.marks.stage import marked
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.planners.bounds.lower_bound import lower_bound
from gpp.report.compare.boundaries import show_boundaries
from gpp.report.compare.page import compare_report
from gpp.report.compare.terminal import show_comparison
from gpp.report.run.console import make_console
from gpp.report.run.explain_terminal import show_explanation
from gpp.report.run.page import run_report
from gpp.report.run.profile import show_profile
from gpp.report.run.record import Asked, Planned, PlanWorth, RunRecord, Surveyed
from gpp.report.run.strategies import compared_dicts, strategy_lines
from gpp.report.run.terminal import show_plan
from tests.support.fake_runs import branchy_graph, plan_of
from tests.support.page_check import parse

STRATEGIES = [
    Strategy(name=type(p).__name__.lower(), planner=p, schedule=OneFOneB())
    for p in (GraphPipe(colocate="never"), Sequential(), Even())
]
REASON = "no plan found fits the 16.0 GB of a device: " + "every stage needs more. " * 8


@pytest.fixture(scope="module")
def compared() -> RunRecord:
    graph = branchy_graph(4)
    _, problem = plan_of(graph)
    bound = lower_bound(problem)
    attempts = []
    for strategy in STRATEGIES:
        plan = strategy.plan(problem)
        attempts.append(Attempt(strategy=strategy.name, status="ok", plan=plan, predicted=strategy.predict(plan, problem)))
    attempts.append(Attempt(strategy="piper", status="infeasible", error=GppError(REASON), search_s=60.0))
    best = best_of(attempts).own
    assert best and best.plan and best.predicted
    return RunRecord(
        asked=Asked(model="towers", strategy="graphpipe", cluster="c", engine="simulate"),
        planned=Planned(plan=best.plan, graph=graph, cluster=problem.cluster, predicted=best.predicted),
        judged=PlanWorth(
            bound=bound, explanation=explain(best.plan, best.predicted, problem, STRATEGIES[0], bound=bound, budget_s=60.0)
        ),
        survey=Surveyed(attempts=tuple(attempts)),
    )


def printed(width: int, show, run: object) -> str:
    file = io.StringIO()
    show(make_console(file, width=width), run)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits_and_has_every_strategy(compared: RunRecord, width: int) -> None:
    out = printed(width, show_comparison, compared)
    assert max(map(len, out.splitlines())) <= width
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    for name in ("graphpipe", "sequential", "even", "piper"):
        assert name in rows
    assert "b: samples of a micro-batch." in " ".join(out.split())
    assert "1.00×" in out and "best: " in out and "from optimal (bound" in out
    assert "piper: infeasible: no plan found fits" in out
    if width == 160:
        assert "infeasible: no plan found fits" in rows["piper"] or "infeasible: no plan" in out
        for column in ("bubble", "depth", "devices", "search", "status"):
            assert column in out


def test_the_best_is_relative_one_and_the_gap_is_that_of_the_bound(compared: RunRecord) -> None:
    assert compared.judged.bound
    found = strategy_lines(compared.attempts, compared.judged.bound)
    assert [line.is_best for line in found].count(True) == 1
    for line in found:
        if line.attempt.predicted:
            seconds = line.attempt.predicted.metrics.iteration_s
            assert line.gap == pytest.approx(seconds / compared.judged.bound.iteration_s - 1) and line.gap >= 0
            assert line.relative and line.relative >= 1 and line.is_best == (line.relative == 1)


def test_no_gap_for_plans_of_which_the_bound_does_not_speak(compared: RunRecord) -> None:
    assert compared.judged.bound
    first = compared.attempts[0]
    assert first.plan and first.predicted
    stages = first.plan.stages
    for changed in (marked(stages[0], recompute=stages[0].ops[:1]), stages[0].having(TensorParallel(degree=2))):
        plan = replace(first.plan, stages=(changed, *stages[1:]))
        # Faster than everything that the bound speaks of.
        metrics = replace(first.predicted.metrics, iteration_s=compared.judged.bound.iteration_s / 2)
        predicted = replace(first.predicted, metrics=metrics)
        run = compared.knowing(
            plan=plan,
            predicted=predicted,
            attempts=(replace(first, strategy="piper", plan=plan, predicted=predicted), *compared.attempts[1:3]),
        )
        found = strategy_lines(run.attempts, run.judged.bound)
        assert found[0].is_best and found[0].gap is None and found[1].gap is not None
        kept = compared_dicts(run.attempts, run.judged.bound, 19)[0]["plan"]
        assert kept["optimality_gap"] is None and kept["lower_bound_s"] is None
        out = printed(160, show_comparison, run) + printed(160, show_plan, run)
        page = " ".join(parse(compare_report(run)).words) + " ".join(parse(run_report(replace(run, survey=None))).words)
        for shown in (" ".join(out.split()), page):
            assert shown.count("no bound is known for plans that recompute or split operators") >= 2
            assert "from optimal" not in shown


def test_a_plan_of_which_no_bound_is_known_says_what_it_has(compared: RunRecord) -> None:
    run = compared.knowing(bound=None, unbounded="updates in parts", explanation=None)
    mixed = compared.knowing(attempts=tuple(replace(each, unbounded="a continuous pipeline") for each in compared.attempts))
    alone = replace(run, survey=None)
    for words, shown, page in (
        ("updates in parts", printed(160, show_plan, alone), run_report(alone)),
        ("updates in parts", printed(160, show_comparison, run), compare_report(run)),
        ("a continuous pipeline", printed(160, show_comparison, mixed), compare_report(mixed)),
    ):
        for text in (" ".join(shown.split()), " ".join(parse(page).words)):
            assert text.lower().count(f"no bound is known for {words}") == 1 and "from optimal (bound" not in text
            assert "gap ≤" not in text


def test_the_json_form(compared: RunRecord) -> None:
    found = compared_dicts(compared.attempts, compared.judged.bound, 19)
    assert [each["status"] for each in found] == ["ok", "ok", "ok", "infeasible"]
    assert found[3]["plan"] is None and found[3]["reason"] == REASON and found[3]["search_s"] == 60.0
    assert found[0]["plan"]["optimality_gap"] >= 0 and found[0]["predicted"]["iteration_s"] > 0


def test_the_page_draws_every_plan_on_one_scale(compared: RunRecord) -> None:
    page = compare_report(compared)
    parsed = parse(page)
    text = " ".join(parsed.words)
    for word in ("Strategies", "Predicted iteration time", "piper: infeasible", "plans/even.json", "best"):
        assert word in text
    assert page.count('aria-label="Stage graph"') / 2 == page.count("<div data-timeline") == 3
    nothing = compared.knowing(attempts=compared.attempts[3:], plan=None, predicted=None, explanation=None)
    assert "piper: infeasible" in " ".join(parse(compare_report(nothing)).words)


def test_equal_plans_are_drawn_once_with_all_names(compared: RunRecord) -> None:
    """Search time and words may differ; other times of the same stages (another schedule) are another drawing."""
    first = compared.attempts[0]
    assert first.plan and first.predicted
    again = replace(first, strategy="again", plan=replace(first.plan, planner="again", search_s=9.0, explanation=("Found it.",)))
    shifted = first.predicted.events[0]._replace(end_s=first.predicted.events[0].end_s * 1.5)
    late = replace(first, strategy="late", predicted=replace(first.predicted, events=(shifted, *first.predicted.events[1:])))
    page = compare_report(compared.knowing(attempts=(*compared.attempts, again, late)))
    words = parse(page).words
    assert page.count("<div data-timeline") == 4
    assert [word for word in words if "graphpipe, again: " in word] and "the plan of graphpipe" in words
    assert "again: Found it." in words and any(word.startswith("late: ") for word in words)


@pytest.mark.parametrize("width", [80, 160])
def test_the_explanation_fits_the_terminal(compared: RunRecord, width: int) -> None:
    out = printed(width, show_explanation, compared)
    assert max(map(len, out.splitlines())) <= width
    words = " ".join(out.split())
    for word in (
        "the bottleneck is s",
        "bound by",
        "what the bubble is made of",
        "filling",
        "twice the memory",
        "another cluster",
        "split",
    ):
        assert word in words
    assert "from optimal" in printed(width, show_plan, replace(compared, survey=None))


def test_the_explanation_is_a_section_of_the_page(compared: RunRecord) -> None:
    page = run_report(replace(compared, survey=None))
    text = " ".join(parse(page).words)
    for word in (
        "Why it takes this long",
        "What each device does and waits for",
        "twice the devices",
        "Planned again",
        "from optimal",
    ):
        assert word in text
    assert 'aria-label="What each device does and waits for"' in page


@pytest.mark.parametrize("width", [80, 160])
def test_the_plan_says_which_stages_recompute_or_split(compared: RunRecord, width: int) -> None:
    assert compared.plan
    first, second, *others = compared.plan.stages
    stages = (marked(first, recompute=first.ops), replace(second, devices=(1, 20)).having(TensorParallel(degree=2)), *others)
    run = replace(compared, survey=None).knowing(plan=replace(compared.plan, stages=stages), explanation=None)
    out = printed(width, show_plan, run)
    assert max(map(len, out.splitlines())) <= width
    for words in (out, " ".join(parse(run_report(run)).words)):
        assert f"{len(first.ops)} recomputed" in words and "split in 2" in words
    assert "operators" not in printed(width, show_plan, replace(compared, survey=None).knowing(explanation=None)).split("•")[0]


def test_a_ceiling_is_never_the_best(compared: RunRecord) -> None:
    first = best_of(compared.attempts).own
    assert first is not None
    without = tuple(replace(attempt, ceiling=attempt is first) for attempt in compared.attempts)
    second = best_of(without).own
    assert second is not None and second.strategy != first.strategy and second.sample_s >= first.sample_s


def test_largest_micro_batches_keep_the_names_of_strategies_in_a_narrow_terminal(compared: RunRecord) -> None:
    sizes = {"microbatch_size": 64, "microbatches": 4, "beyond": 66, "reason": None, "tried": ()}
    names = [f"pipedream_flush_{n}" for n in range(4)]
    found = [
        LargestMicrobatch(best=replace(each, strategy=name), **sizes) for name, each in zip(names, compared.attempts, strict=True)
    ]
    out = printed(80, show_boundaries, compared.knowing(boundaries=tuple(found)))
    rows = [line.split()[:4] for line in out.splitlines() if "pipedream_flush_" in line]
    assert rows == [[name, "64", "66", "256"] for name in names]
    assert max(map(len, out.splitlines())) <= 80 and "b, the samples of a micro-batch" in " ".join(out.split())


def test_a_profile_names_its_operators_in_a_narrow_terminal() -> None:
    plan, problem = plan_of(graph := branchy_graph(2))
    times, kind = ((0.123,),) * graph.num_ops, problem.cluster.devices[0].kind
    found = GraphProfile(
        graph_fingerprint=graph.fingerprint,
        setting=replace(cpu_setting(1), device_kind=kind),
        sample_counts=(1,),
        forward_s=times,
        backward_s=times,
        apart=(1.25,) * graph.num_ops,
    )
    cost = Profiled(cache_dir="x", profiles=(found,))
    for width in (80, 160):
        out = printed(width, lambda console, run: show_profile(console, run, plan), replace(problem, cost=cost))
        assert "layers.0" in out and max(map(len, out.splitlines())) <= width
    assert "in halves: " in out
