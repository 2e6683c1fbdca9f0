"""Positions of the boxes and arrows of a stage graph, in pixels.

A layered drawing after Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical
system structures", 1981: a layer is the longest path from a source, long edges pass their layers as
dummies, barycentre sweeps order each layer, and least squares place it. Graphs with more layers than
the page is wide are cut into bands; an edge between bands becomes a pair of stubs that name each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

SWEEPS = 12
SMALLEST_BOX = 89.0
"""Pixels of the narrowest box, which still has room for a number, devices and half a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Sizes in pixels; `lines` of module names fit into a box."""

    box_width: float
    box_height: float
    column_gap: float
    row_gap: float = 20.0
    dummy_gap: float = 14.0
    lines: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A stage's rectangle, from its upper left corner."""

    stage: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An edge as points from left to right, and where its label is centred.

    `partners` is empty, or names the stages at the other ends of a stub (`leaving` says which end this is);
    `edge` is the first of its edges.
    """

    edge: tuple[int, int]
    points: tuple[tuple[float, float], ...]
    label: tuple[float, float]
    partners: tuple[int, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDrawing:
    """The whole drawing."""

    style: Style
    width: float
    height: float
    boxes: tuple[Box, ...]
    routes: tuple[Route, ...]


@dataclass(slots=True)
class _LayerNode:
    """A stage or a dummy of a long edge, in one layer."""

    layer: int
    stage: int | None
    edge: tuple[int, int] | None = None
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    y: float = 0.0


def layers_of(num_stages: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Layer of every stage: edges on the longest path from a source."""
    out = [0] * num_stages
    for a, b in sorted(edges):
        out[b] = max(out[b], out[a] + 1)
    return out


def choose_style(num_layers: int, num_rows: int, width: float) -> tuple[Style, int]:
    """Sizes for a page of `width` pixels, and the layers that one band holds; many rows make low boxes."""
    for style in (
        Style(box_width=250, box_height=92, column_gap=120, lines=3),
        Style(box_width=188, box_height=92, column_gap=84, lines=3),
        Style(box_width=138, box_height=78, column_gap=56, lines=2),
        Style(box_width=98, box_height=62, column_gap=50, row_gap=16, lines=1),
    ):
        if num_layers * style.box_width + (num_layers - 1) * style.column_gap <= width:
            return replace(style, box_height=60, row_gap=12, lines=1) if num_rows > 8 else style, num_layers
    most = max(1, int((width - 100 + 50) // (SMALLEST_BOX + 50)))
    per_band = -(-num_layers // -(-num_layers // most))
    box_width = max(SMALLEST_BOX, (width - 100 - 50 * (per_band - 1)) / per_band)
    return Style(box_width=box_width, box_height=62, column_gap=50, row_gap=16, lines=1), per_band


def layout(num_stages: int, edges: Sequence[tuple[int, int]], width: float = 1320.0) -> GraphDrawing:
    """Place `num_stages` stages, numbered in a topological order, and their edges.

    Args:
        edges: (producer, consumer), producer < consumer.
        width: pixels that the drawing may take.
    """
    layer = layers_of(num_stages, edges)
    num_layers = max(layer, default=0) + 1
    num_rows = max(layer.count(n) for n in range(num_layers)) if layer else 1
    style, per_band = choose_style(num_layers, num_rows, width)
    boxes: list[Box] = []
    routes: list[Route] = []
    top = 0.0
    num_bands = -(-num_layers // per_band)
    margin = 44.0 if num_bands > 1 else 0.0
    for band in range(num_bands):
        low, high = band * per_band, min((band + 1) * per_band, num_layers)
        inside = [e for e in edges if low <= layer[e[0]] and layer[e[1]] < high]
        nodes, columns = _nodes({s: layer[s] - low for s in range(num_stages) if low <= layer[s] < high}, inside, high - low)
        _order(nodes, columns)
        _place(nodes, columns, style)
        bottom = max(n.y + _half(n, style) for n in nodes)
        lift = top - min(n.y - _half(n, style) for n in nodes)
        for node in nodes:
            node.y += lift
        band_boxes = [
            Box(
                stage=n.stage,
                x=margin + n.layer * (style.box_width + style.column_gap),
                y=n.y - style.box_height / 2,
                width=style.box_width,
                height=style.box_height,
            )
            for n in nodes
            if n.stage is not None
        ]
        routes += _routes(nodes, band_boxes, inside, style, margin)
        crossing = [e for e in edges if (low <= layer[e[0]] < high) != (low <= layer[e[1]] < high)]
        routes += _stubs(band_boxes, crossing)
        boxes += band_boxes
        top = bottom + lift + 34
    boxes.sort(key=lambda box: box.stage)
    right = max(box.x + box.width for box in boxes) + margin
    return GraphDrawing(style=style, width=right, height=top - 34, boxes=tuple(boxes), routes=tuple(routes))


def _half(node: _LayerNode, style: Style) -> float:
    return style.box_height / 2 if node.stage is not None else 1.0


def _nodes(stages: dict[int, int], edges: list[tuple[int, int]], num_layers: int) -> tuple[list[_LayerNode], list[list[int]]]:
    """Nodes of a band, and the node numbers of each layer."""
    nodes = [_LayerNode(layer, stage) for stage, layer in stages.items()]
    number = {node.stage: i for i, node in enumerate(nodes)}
    for a, b in edges:
        last = number[a]
        for layer in range(stages[a] + 1, stages[b]):
            nodes.append(_LayerNode(layer, None, (a, b), left=[last]))
            nodes[last].right.append(len(nodes) - 1)
            last = len(nodes) - 1
        nodes[last].right.append(number[b])
        nodes[number[b]].left.append(last)
    columns: list[list[int]] = [[] for _ in range(num_layers)]
    for i, node in enumerate(nodes):
        columns[node.layer].append(i)
    return nodes, columns


def _order(nodes: list[_LayerNode], columns: list[list[int]]) -> None:
    """Barycentre sweeps, left to right and back; the order with fewest crossings stays."""
    best, fewest = [list(c) for c in columns], _crossings(nodes, columns)
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        position = {i: p for column in columns for p, i in enumerate(column)}
        for column in columns if forward else reversed(columns):
            around = {i: nodes[i].left if forward else nodes[i].right for i in column}
            weight = {i: sum(position[j] for j in js) / len(js) if js else position[i] for i, js in around.items()}
            column.sort(key=lambda i, weight=weight, position=position: (weight[i], position[i]))
            position |= {i: p for p, i in enumerate(column)}
        count = _crossings(nodes, columns)
        if count < fewest:
            best, fewest = [list(c) for c in columns], count
    columns[:] = best


def _crossings(nodes: list[_LayerNode], columns: list[list[int]]) -> int:
    position = {i: p for column in columns for p, i in enumerate(column)}
    total = 0
    for column in columns:
        pairs = [(position[i], position[j]) for i in column for j in nodes[i].right]
        total += sum((a - c) * (b - d) < 0 for n, (a, b) in enumerate(pairs) for c, d in pairs[:n])
    return total


def _place(nodes: list[_LayerNode], columns: list[list[int]], style: Style) -> None:
    """Vertical positions: every node near the mean of its neighbours, in order, without overlap."""

    def gap(a: int, b: int) -> float:
        both = nodes[a].stage is not None and nodes[b].stage is not None
        return _half(nodes[a], style) + _half(nodes[b], style) + (style.row_gap if both else style.dummy_gap)

    for column in columns:
        gaps = [gap(a, b) for a, b in pairwise(column)]
        y = -sum(gaps) / 2
        for i, step in zip(column, [0.0, *gaps], strict=True):
            y += step
            nodes[i].y = y
    for sweep in range(2 * SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wanted = []
            for i in column:
                around = nodes[i].left if sweep % 2 == 0 else nodes[i].right
                around = around or (nodes[i].right if sweep % 2 == 0 else nodes[i].left)
                wanted.append(sum(nodes[j].y for j in around) / len(around) if around else nodes[i].y)
            for i, y in zip(column, separate(wanted, [gap(a, b) for a, b in pairwise(column)]), strict=True):
                nodes[i].y = y


def separate(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Least-squares positions near `wanted`, in order, neighbours at least `gaps` apart (pool adjacent violators)."""
    offset = [0.0]
    for step in gaps:
        offset.append(offset[-1] + step)
    blocks: list[tuple[float, int]] = []
    for value, shift in zip(wanted, offset, strict=False):
        mean, count = value - shift, 1
        while blocks and blocks[-1][0] > mean:
            other, size = blocks.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + shift for mean, shift in zip(means, offset, strict=False)]


def _routes(nodes: list[_LayerNode], boxes: list[Box], edges: list[tuple[int, int]], style: Style, margin: float) -> list[Route]:
    """Edges inside a band, through their dummies; ends are spread over the sides of the boxes."""
    box_of = {box.stage: box for box in boxes}
    pitch = style.box_width + style.column_gap
    via: dict[tuple[int, int], list[_LayerNode]] = {edge: [] for edge in edges}
    for node in nodes:
        if node.edge is not None:
            via[node.edge].append(node)
    middle = {s: box.y + box.height / 2 for s, box in box_of.items()}

    def toward(edge: tuple[int, int], outgoing: bool) -> float:
        chain = via[edge]
        return (chain[0] if outgoing else chain[-1]).y if chain else middle[edge[1] if outgoing else edge[0]]

    def port(edge: tuple[int, int], outgoing: bool) -> float:
        stage = edge[0] if outgoing else edge[1]
        same = sorted((e for e in edges if e[0 if outgoing else 1] == stage), key=lambda e: (toward(e, outgoing), e))
        spread = min(14.0, (style.box_height - 24) / max(1, len(same) - 1))
        return middle[stage] + (same.index(edge) - (len(same) - 1) / 2) * spread

    out, labels = [], []
    for edge in edges:
        a, b = box_of[edge[0]], box_of[edge[1]]
        points = [(a.x + a.width, port(edge, True))]
        for node in via[edge]:
            points += [(margin + node.layer * pitch, node.y), (margin + node.layer * pitch + style.box_width, node.y)]
        points.append((b.x, port(edge, False)))
        (x0, y0), (x1, y1) = points[0], points[1]
        labels.append(((x0 + x1) / 2, (y0 + y1) / 2))
        out.append((edge, tuple(points)))
    spread = list(labels)  # those of one column gap are pushed apart
    for x in {x for x, _ in labels}:
        here = sorted((i for i, label in enumerate(labels) if label[0] == x), key=lambda i: (labels[i][1], i))
        for i, y in zip(here, separate([labels[i][1] for i in here], [13.0] * (len(here) - 1)), strict=True):
            spread[i] = (x, y)
    return [Route(edge=edge, points=points, label=label) for (edge, points), label in zip(out, spread, strict=True)]


def _stubs(boxes: list[Box], edges: list[tuple[int, int]]) -> list[Route]:
    """Short ends of edges that leave a band or enter it; more than three on one side share one stub."""
    out = []
    for box in boxes:
        for leaving in (True, False):
            mine = sorted(e for e in edges if e[0 if leaving else 1] == box.stage)
            bundles = [[edge] for edge in mine] if len(mine) <= 3 else [mine]
            for n, bundle in enumerate(reversed(bundles)):
                y = box.y + box.height - 9 - n * 11  # below the ports of edges that stay in the band
                x = box.x + box.width if leaving else box.x
                points = ((x, y), (x + 8, y)) if leaving else ((x - 8, y), (x, y))
                label = (x + 10, y) if leaving else (x - 10, y)
                partners = tuple(edge[1 if leaving else 0] for edge in bundle)
                out.append(Route(edge=bundle[0], points=points, label=label, partners=partners, leaving=leaving))
    return out
