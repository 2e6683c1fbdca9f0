"""The plan as a drawing: stages as boxes coloured by branch, edges with their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from gpp.graph.op_graph import OpGraph
from gpp.plan.plan import Plan
from gpp.report.draw import text
from gpp.report.draw.layout import Box, GraphDrawing, Route, layout
from gpp.report.draw.palette import ARROW, MUTED, ON_SOFT, PAGE, TRUNK, branch_of, branch_shares, tone
from gpp.report.draw.svg import MONO, MONO_ADVANCE, Drawing, Swatch, element, label, number, picture, rect, swatch, tooltip
from gpp.stage import Stage

HATCH, HATCH_DARK = "hatch", "hatch-dark"
LABEL_WIDTH, LABEL_HEIGHT = 34.0, 11.0


def hatch_definition() -> Drawing:
    """The hatch that marks the second round of hues; once in a page."""
    patterns = "".join(
        f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<path d="M0 7L7 0M-1 1L1 -1M6 8L8 6" stroke="var(--hatch)" stroke-width="1.6" stroke-opacity="{opacity}"/></pattern>'
        for name, opacity in ((HATCH, ".55"), (HATCH_DARK, ".28"))
    )
    return Drawing(
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
        f'{patterns}<marker id="arrow" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 .5L8 4L0 7.5z" fill="{ARROW}"/></marker></defs></svg>'
    )


def module_names(plan: Plan, graph: OpGraph, stage: int) -> tuple[str, ...]:
    """Short paths of the modules that a stage holds."""
    return text.compress_names([graph.ops[op].name for op in plan.stages[stage].ops], [op.name for op in graph.ops])


def operator_words(stage: Stage) -> str:
    """What mechanisms say of a stage, those first that make it hold less; empty for an ordinary stage."""
    said = (value.words() for value in sorted(stage.mechanisms, key=lambda value: not value.spares))
    return ", ".join(filter(None, said))


def device_words(stage: Stage) -> str:
    """The devices of a stage, and how they have micro-batches where not all have a part in each."""
    return f"{text.ranges(stage.devices, 'd')} {stage.dealt}".rstrip()


def microbatch_words(plan: Plan) -> str:
    """The sizes of the stages' micro-batches, ascending."""
    return ", ".join(map(str, sorted({stage.microbatch_size for stage in plan.stages})))


def edge_bytes(plan: Plan, graph: OpGraph) -> dict[tuple[int, int], float | None]:
    """Bytes that one micro-batch of the producer puts on each edge, forwards; None on an order-only edge, and nothing on one whose
    tensors the reader gets from another stage of its device."""
    sizes = plan.message_bytes(graph)
    return {
        edge: (sizes[edge].forward if edge in sizes else 0.0) * plan.stages[edge[0]].microbatch_size if tensors else None
        for edge, tensors in plan.edge_tensors(graph).items()
    }


def draw_stage_graph(plan: Plan, graph: OpGraph, branches: Sequence[int | None], width: float = 1320.0) -> Drawing:
    """The stage graph as an SVG element."""
    pad = 8.0
    place = layout(len(plan.stages), plan.edges, width - 2 * pad)
    sizes = edge_bytes(plan, graph)
    body = [_edge(route, sizes[route.edge]) for route in place.routes]
    body += [
        _edge_label(route, sizes[route.edge], place.style.column_gap) for route in _with_room(place.routes, place.style.column_gap)
    ]
    body += [_box(plan, graph, branches, box, place) for box in place.boxes]
    inner = element("g", "".join(body), transform=f"translate({pad} {pad})")
    return picture(max(place.width + 2 * pad, 320.0), place.height + 2 * pad, [inner], "Stage graph")


def _with_room(routes: Sequence[Route], gap: float) -> list[Route]:
    """Routes whose labels do not cover an earlier label; a route without a label shows its bytes on hovering."""
    out: dict[tuple[float, float], Route] = {}
    for route in routes:
        x, y = route.label[0], route.label[1] - (8.4 if _above(route, gap) else 0.0)
        if all(abs(x - a) >= LABEL_WIDTH or abs(y - b) >= LABEL_HEIGHT for a, b in out):
            out[x, y] = route
    return list(out.values())


def _above(route: Route, gap: float) -> bool:
    """Whether a route's label stands above its line, which is too short to carry the label."""
    return gap < 70 and not route.partners and abs(route.points[0][1] - route.points[1][1]) < 6


def _edge(route: Route, size: float | None) -> str:
    (x, y), *rest = route.points
    path = f"M{number(x)} {number(y)}"
    for x1, y1 in rest:
        bend = number((x + x1) / 2)
        path += f"H{number(x1)}" if y1 == y else f"C{bend} {number(y)} {bend} {number(y1)} {number(x1)} {number(y1)}"
        x, y = x1, y1
    tip = f"s{route.edge[0]} → s{route.edge[1]}: "
    tip += "order only, no data" if size is None else f"{text.num_bytes(size)} per micro-batch"
    if len(route.partners) > 1:
        tip = f"{'to' if route.leaving else 'from'} {text.ranges(route.partners, 's')}"
    dashes = "4 3" if size is None and not route.partners else None
    return element(
        "path",
        tooltip(tip),
        d=path,
        data_stage=" ".join(map(str, {*route.edge, *route.partners})),
        fill="none",
        stroke=ARROW,
        stroke_width=1.4,
        stroke_dasharray=dashes,
        marker_end="url(#arrow)",
    )


def _edge_label(route: Route, size: float | None, gap: float) -> str:
    x, y = route.label
    if route.partners:
        content = f"s{route.partners[0]}" if len(route.partners) == 1 else f"{len(route.partners)} stages"
        return label(x, y + 3.2, content, 9, MUTED, "start" if route.leaving else "end", title=text.ranges(route.partners, "s"))
    if size is None:
        return ""
    content = text.num_bytes(size)
    if _above(route, gap):
        return label(x, y - 5, content, 9, MUTED, "middle")
    width = len(content) * 5.4 + 4
    return rect(x - width / 2, y - 6.5, width, 13, PAGE, fill_opacity=".88", rx="2") + label(
        x, y + 3.4, content, 9.5, MUTED, "middle"
    )


def _box(plan: Plan, graph: OpGraph, branches: Sequence[int | None], box: Box, place: GraphDrawing) -> str:
    stage, style = plan.stages[box.stage], place.style
    shares = branch_shares(stage, graph, branches)
    colours = tone(branch_of(stage, graph, branches))
    names = module_names(plan, graph, box.stage)
    devices = device_words(stage)
    roomy = style.box_width >= 120
    portions = f"micro-batch {stage.microbatch_size}, {stage.in_flight} samples in flight"
    special = [f"operators: {operator_words(stage)}"] if operator_words(stage) else []
    tip = "\n".join([f"stage {box.stage} on {devices}", portions, *special, *names])
    out = [
        tooltip(tip),
        rect(box.x, box.y, box.width, box.height, colours.soft, rx="5", stroke=colours.strong, stroke_width="1.2"),
    ]
    if colours.hatched:
        out.append(rect(box.x, box.y, box.width, box.height, f"url(#{HATCH})", rx="5"))
    y = box.y + 5
    for branch, share in sorted(shares.items(), key=lambda item: -1 if item[0] is None else item[0]):
        height = share * (box.height - 10)
        out.append(rect(box.x + 4, y, 5, height, (tone(branch) if branch is not None else TRUNK).strong))
        y += height
    left, right = box.x + 14, box.x + box.width - 8
    out.append(label(left, box.y + 17, f"s{box.stage}", 13, ON_SOFT, font_weight="700"))
    room = int((box.width - 22 - 8 * len(f"s{box.stage}") - 6) / (10.5 * 0.62))
    out.append(label(right, box.y + 17, text.shorten(devices, max(3, room)), 10.5, ON_SOFT, "end"))
    size = 10.0 if roomy else 9.0
    chars = int((box.width - 22) / (size * MONO_ADVANCE))
    for n, name in enumerate(_lines(names, style.lines, chars)):
        out.append(label(left, box.y + 32 + 13 * n, name, size, ON_SOFT, font_family=MONO))
    last = (
        f"b = {stage.microbatch_size} · {stage.in_flight} in flight" if roomy else f"b={stage.microbatch_size}, i={stage.in_flight}"
    )
    out.append(label(left, box.y + box.height - 8, last, 10.5 if roomy else 9.5, ON_SOFT))
    return element("g", "".join(out), data_stage=box.stage, role="button", aria_pressed="false")


def _lines(names: tuple[str, ...], lines: int, chars: int) -> list[str]:
    """The names in at most `lines` lines. The last line counts the rest."""
    if len(names) <= lines:
        return [text.path_end(name, chars) for name in names]
    if lines == 1:
        rest = f" +{len(names) - 1}"
        return [text.path_end(names[0], chars - len(rest)) + rest]
    return [*(text.path_end(name, chars) for name in names[: lines - 1]), f"+{len(names) - lines + 1} more modules"[:chars]]


def branch_swatches(plan: Plan, graph: OpGraph, branches: Sequence[int | None]) -> list[Swatch]:
    """The legend of the branches' colours, the trunk first."""
    present = {branch for stage in plan.stages for branch in branch_shares(stage, graph, branches)}
    out = []
    for branch in sorted(present, key=lambda b: -1 if b is None else b):
        colours = tone(branch)
        halves = [rect(0, 0, 13, 12, colours.soft), rect(13, 0, 13, 12, colours.strong)]
        hatch = [rect(0, 0, 26, 12, f"url(#{HATCH})")] if colours.hatched else []
        out.append(swatch("trunk, or several branches" if branch is None else f"branch {branch}", *halves, *hatch))
    return out
