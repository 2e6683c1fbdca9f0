"""Draw the picture of docs/timeline.md: the stage graph and both timelines of a run.

python run.py model=mmt_small minibatch_size=64 microbatch_size=16 cluster.num_devices=2 hydra.run.dir=outputs/pictured
python -m docs.draw_run outputs/pictured
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.draw import ROOT, WIDTH, below
from gpp.graph.op_graph import OpGraph
from gpp.graph.series_parallel import branches
from gpp.plan.plan import Plan
from gpp.report.draw.stage_graph import draw_stage_graph
from gpp.report.draw.timelines import draw_timelines, rows_of
from gpp.serialization import read_json
from gpp.timeline import Timeline


def main(run_dir: Path) -> None:
    """Write docs/timeline.svg."""
    plan, graph = read_json(Plan, run_dir / "job/plan.json"), read_json(OpGraph, run_dir / "job/graph.json")
    both = read_json(dict[str, Timeline], run_dir / "timeline.json")
    of = branches(graph)
    named = [(name.capitalize(), timeline) for name, timeline in both.items()]
    rows = rows_of(plan, graph, of, both.values())
    path = ROOT / "docs" / "timeline.svg"
    path.write_text(below(draw_stage_graph(plan, graph, of, WIDTH), draw_timelines(named, rows, WIDTH)))
    print(f"{path.relative_to(ROOT)}: {', '.join(f'{name} {1e3 * t.metrics.iteration_s:.1f} ms' for name, t in both.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
