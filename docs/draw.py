"""Draw the pictures of docs/strategies.md: every strategy's plan for one small problem.

    python -m docs.draw

The problem is GraphPipe's multi-modal Transformer, four equal branches of eight layers, on eight V100s in two nodes, 64
samples in micro-batches of eight. The timelines have one scale, and those of
continuous pipelines another: they show one mini-batch of the steady state.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.analysis.comparison import Attempt, attempt
from gpp.app.experiment import Experiment
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import branches
from gpp.report.draw.stage_graph import draw_stage_graph, hatch_definition
from gpp.report.draw.svg import element, standalone
from gpp.report.draw.timelines import draw_timelines, rows_of, span_s

ROOT = Path(__file__).resolve().parent.parent
DRAINING = ("graphpipe", "sequential", "gpipe", "pipedream_flush", "piper", "even", "data_parallel", "dawnpiper")
ASYNCHRONOUS = ("pipedream", "pipedream_2bw", "spectrain", "pipeoptim", "layerpipe")
SCHEDULES = ("interleaved_1f1b", "zero_bubble_v", "v_half", "v_min", "zero_bubble_auto")
"""Schedules that need more than a rule for each stage, on the chain of `sequential`."""
PICTURES = {name: (f"strategy={name}",) for name in (*DRAINING, *ASYNCHRONOUS)} | {
    **{name: ("strategy=sequential", f"strategy/schedule={name}", f"strategy.name={name}") for name in SCHEDULES},
    "graphpipe_apart": ("strategy=graphpipe", "strategy.planner.colocate=never", "strategy.name=graphpipe_apart"),
    "zero_bubble": ("strategy=zero_bubble", "strategy.planner.colocate=never"),
    # A micro-batch is a mini-batch, as published; no chain of eight stages has room for that.
    "graphpipe_pipeoptim": (
        "strategy=graphpipe",
        "strategy/weights=pipeoptim",
        "strategy.name=graphpipe_pipeoptim",
        "microbatch_size=64",
    ),
}
PROBLEM = ("model=mmt", "cluster=summit_2x4", "minibatch_size=64", "microbatch_size=8", "mode=plan", "strategies=[]")
WIDTH = 1200.0


def experiment(name: str, words: tuple[str, ...]) -> Experiment:
    """The experiment as the command line composes it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=[*PROBLEM, *words, f"name={name}"])
        return instantiate(config, _convert_="all")


def draw(found: Attempt, graph: OpGraph, span: float) -> str:
    """The stage graph above the timeline, as a file."""
    plan, predicted = found.plan, found.predicted
    assert plan is not None and predicted is not None, found.reason
    of = branches(graph)
    rows = rows_of(plan, graph, of, [predicted])
    timeline = draw_timelines([(found.strategy, predicted)], rows, WIDTH, scale_s=span)
    return below(draw_stage_graph(plan, graph, of, WIDTH), timeline)


def below(*drawings: str) -> str:
    """Drawings one below the other, as a file."""
    parts, y = [hatch_definition()], 0.0
    for svg in drawings:
        width, height = size(svg)
        shrink = min(1.0, WIDTH / width)
        # A picture is not fitted to a page and has no tooltips; a wide one is made smaller.
        head, _, rest = svg.partition(">")
        head = re.sub(r' (style|width|height)="[^"]*"', "", head)
        box = f'x="{(WIDTH - shrink * width) / 2:.0f}" y="{y:.0f}" width="{shrink * width:.0f}" height="{shrink * height:.0f}"'
        parts.append(f"{head.replace('<svg', f'<svg {box}', 1)}>{re.sub(r'<title>.*?</title>', '', rest, flags=re.S)}")
        y += shrink * height
    whole = element("svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH:.0f} {y:.0f}")
    return standalone(whole)


def size(svg: str) -> tuple[float, float]:
    """Width and height of a drawing."""
    match = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert match is not None
    return float(match[1]), float(match[2])


def main() -> None:
    """Write docs/strategies/NAME.svg for every picture."""
    experiments = [experiment(name, words) for name, words in PICTURES.items()]
    one = experiments[0]
    captured = one.captured()
    problem = one.problem(captured, one.op_graph(captured))
    found = [attempt(each.strategy, replace(problem, microbatch_size=each.microbatch_size)) for each in experiments]
    # Passes of a continuous pipeline are drawn to their end, far beyond a step, so these have a scale of their own.
    drains = {each.strategy.name: each.strategy.schedule.drains for each in experiments}
    spans = {
        kind: span_s(each.predicted for each in found if drains[each.strategy] == kind and each.predicted) for kind in (True, False)
    }
    for each in found:
        path = ROOT / "docs" / "strategies" / f"{each.strategy}.svg"
        path.write_text(draw(each, problem.graph, spans[drains[each.strategy]]))
        print(f"{path.relative_to(ROOT)}: {1e3 * each.iteration_s:.0f} ms")


if __name__ == "__main__":
    main()
