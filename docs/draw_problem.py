"""Draw the picture at the top of README.md: three branches as a chain of stages, and as a graph of them.

    python -m docs.draw_problem

Both timelines are simulated: four operators of equal time, links that cost nothing, four devices, four micro-batches, 1F1B. The
picture has its own ground, light or dark as the reader's system says, so it is readable on any page.
"""

from __future__ import annotations

from pathlib import Path

from gpp.cluster import Device, Link, uniform
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.graph.op_graph import Op, OpGraph, Tensor
from gpp.plan.build import make_plan
from gpp.planners.chains.even import Even
from gpp.report.draw.svg import SANS, element, escape
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.strategy import Strategy
from gpp.timeline import Timeline

NAMES = ("image", "text", "sound", "join")
MICROBATCHES = 4
PANEL, GAP, TOP, ROW, LANE = 430.0, 20.0, 64.0, 26.0, 5.0
WIDTH, HEIGHT = 2 * PANEL + 3 * GAP, 374.0
STYLE = """
.ground{fill:#fff}.words{fill:#1f2933}.quiet{fill:#52606d}.idle{fill:#e4e7eb}.edge{stroke:#52606d}.tip{fill:#52606d}
.s0{fill:#2f6fab}.s1{fill:#b3541e}.s2{fill:#3f7d3c}.s3{fill:#7a4f9c}
@media (prefers-color-scheme:dark){.ground{fill:#161b22}.words{fill:#e6edf3}.quiet{fill:#9aa7b4}.idle{fill:#2b323b}
.edge{stroke:#9aa7b4}.tip{fill:#9aa7b4}.s0{fill:#3d84c6}.s1{fill:#cc6b33}.s2{fill:#4d9949}.s3{fill:#9468b8}}
"""


def simulated(*, chain: bool) -> Timeline:
    """A step of the three branches and their join, each operator on a device of its own."""
    ops = tuple(Op(name=name, forward_flops=1.0, backward_flops=2.0, saved_bytes=1.0) for name in NAMES)
    tensors = tuple(Tensor(name=name, producer=i, consumers=(3,), bytes_per_sample=1.0) for i, name in enumerate(NAMES[:3]))
    device = Device(kind="cpu", memory_bytes=1e15, peak_flop_per_s={"float32": 1}, memory_bandwidth_bytes_per_s=1)
    free = Link(latency_s=0.0, bandwidth_bytes_per_s=1e30)
    cluster = uniform(name="four", num_nodes=1, devices_per_node=4, device=device, intra_node=free)
    graph = OpGraph(name="branches", ops=ops, tensors=tensors)
    problem = Problem(graph=graph, cluster=cluster, cost=Constant(), minibatch_size=MICROBATCHES, microbatch_size=1)
    plan = make_plan(problem, "by hand", [(1 << i, 1) for i in range(4)], 1, chain=chain)
    return Strategy(name="by hand", planner=Even(), schedule=OneFOneB()).predict(plan, problem)


def words(x: float, y: float, text: str, *, size: float = 13.0, kind: str = "words", **more: object) -> str:
    """A line of text; `kind` is its class in `STYLE`."""
    return element("text", escape(text), x=x, y=y, font_size=size, class_=kind, **more)


def box(x: float, y: float, stage: int) -> str:
    """A stage with its name, its upper left corner at (x, y)."""
    middle = words(x + 36, y + 19, NAMES[stage], size=12.0, kind="", fill="#fff", text_anchor="middle")
    return element("rect", x=x, y=y, width=72.0, height=28.0, rx=5.0, class_=f"s{stage}") + middle


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """An edge of the stage graph."""
    return element("path", d=f"M{x0} {y0}L{x1} {y1}", class_="edge", stroke_width=1.6, marker_end="url(#tip)")


def stages(x: float, *, chain: bool) -> str:
    """The stage graph, in a panel whose left edge is x."""
    if chain:
        places = [(x + 104 * i, TOP + 40) for i in range(4)]
        edges = [(i, i + 1) for i in range(3)]
    else:
        places = [(x + 90, TOP + 40 * i) for i in range(3)] + [(x + 262, TOP + 40)]
        edges = [(i, 3) for i in range(3)]
    ends = [(places[a][0] + 72, places[a][1] + 14, places[b][0] - 3, places[b][1] + 14) for a, b in edges]
    return "".join(arrow(*each) for each in ends) + "".join(box(*place, stage) for stage, place in enumerate(places))


def timeline(x: float, of: Timeline, scale: float) -> str:
    """A row for each device: forwards light, backwards full, both with their micro-batch; idle time is grey."""
    top, parts = TOP + 156, []
    length = of.metrics.iteration_s
    for device in range(4):
        y = top + device * (ROW + LANE)
        parts.append(words(x, y + 17, f"device {device}", size=11.0, kind="quiet"))
        parts.append(element("rect", x=x + 56, y=y, width=length * scale, height=ROW, class_="idle"))
        for event in (event for event in of.events if event.device == device and event.kind in "FB"):
            width = (event.end_s - event.start_s) * scale - 1
            begin = x + 56 + event.start_s * scale
            forward = event.kind == "F"
            opacity = 0.55 if forward else None
            parts.append(element("rect", x=begin, y=y, width=width, height=ROW, class_=f"s{event.stage}", fill_opacity=opacity))
            number = words(
                begin + width / 2,
                y + 17,
                str(event.microbatch),
                size=10.0,
                kind="words" if forward else "",
                text_anchor="middle",
                fill="#fff",
            )
            parts.append(number)
    return "".join(parts)


def main() -> None:
    """Write docs/problem.svg."""
    chain, graph = simulated(chain=True), simulated(chain=False)
    slow, fast = chain.metrics, graph.metrics
    scale = (PANEL - 60) / slow.iteration_s
    tip = element("path", d="M0 .5L8 4L0 7.5z", class_="tip")
    marker = element(
        "marker", tip, id="tip", viewBox="0 0 8 8", refX=7.0, refY=4.0, markerWidth=6.0, markerHeight=6.0, orient="auto"
    )
    parts = [element("style", STYLE), element("defs", marker), element("rect", width=WIDTH, height=HEIGHT, rx=8.0, class_="ground")]
    for i, (title, below, of) in enumerate(
        (
            ("A chain of stages", "The branches take turns, although none needs another.", chain),
            (
                "A graph of stages",
                f"The branches run side by side: {slow.iteration_s / fast.iteration_s:.1f} times as fast here.",
                graph,
            ),
        )
    ):
        x = GAP + i * (PANEL + GAP)
        parts.append(words(x, 28, title, size=16.0, font_weight="600"))
        parts.append(words(x, 48, below, kind="quiet"))
        parts.append(stages(x, chain=of is chain))
        parts.append(timeline(x, of, scale))
    says = f"A step of {MICROBATCHES} micro-batches on four devices: forwards are light, backwards full, idle devices grey."
    parts.append(words(GAP, HEIGHT - 8, says, size=11.5, kind="quiet"))
    label = "Three branches as a chain of stages and as a graph of stages, with the timelines of both"
    whole = element(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        font_family=SANS,
        role="img",
        aria_label=label,
    )
    path = Path(__file__).resolve().parent / "problem.svg"
    path.write_text(whole + "\n")
    idle = f"idle {slow.bubble_fraction:.0%} and {fast.bubble_fraction:.0%}"
    print(f"{path.name}: {slow.iteration_s:.0f} against {fast.iteration_s:.0f} units of time, {idle}")


if __name__ == "__main__":
    main()
