from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from gpp.report.draw.layout import GraphDrawing, layers_of, layout, separate
from gpp.report.draw.stage_graph import LABEL_HEIGHT, LABEL_WIDTH, _with_room
from tests.support.fake_runs import branchy_graph, plan_of


def segments(place: GraphDrawing) -> list[tuple[tuple[float, float], tuple[float, float], tuple[int, int]]]:
    return [(p, q, route.edge) for route in place.routes for p, q in zip(route.points, route.points[1:], strict=False)]


def check_geometry(place: GraphDrawing) -> None:
    for a, b in combinations(place.boxes, 2):
        apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
        assert apart, f"boxes {a.stage} and {b.stage} overlap"
    for box in place.boxes:
        assert (
            box.x >= 0 and box.y >= -1e-6 and box.x + box.width <= place.width + 1e-6 and box.y + box.height <= place.height + 1e-6
        )
        for (x0, y0), (x1, y1), edge in segments(place):
            inside_x = min(x0, x1) < box.x + box.width - 1e-6 and max(x0, x1) > box.x + 1e-6
            if inside_x:  # an edge crosses a box's column only as a level segment through a dummy
                assert y0 == y1 and not box.y < y0 < box.y + box.height, f"edge {edge} runs through box {box.stage}"
    labels = [r.label for r in place.routes if not r.partners]
    for (xa, ya), (xb, yb) in combinations(labels, 2):
        assert abs(xa - xb) > 30 or abs(ya - yb) >= 12.9, "labels overlap"


@pytest.mark.parametrize("num_branches", [4, 7, 16])
@pytest.mark.parametrize("per_branch", [1, 2, 4])
@pytest.mark.parametrize("chain", [False, True])
def test_nothing_overlaps(num_branches: int, per_branch: int, chain: bool) -> None:
    plan, _ = plan_of(branchy_graph(num_branches), per_branch=per_branch, chain=chain)
    place = layout(len(plan.stages), plan.edges)
    check_geometry(place)
    assert [box.stage for box in place.boxes] == list(range(len(plan.stages)))
    assert place.width <= 1330


def test_skip_edges_pass_between_boxes() -> None:
    check_geometry(layout(6, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (0, 3), (1, 4))))


def test_unequal_branches() -> None:
    edges = ((0, 3), (1, 2), (2, 3), (3, 6), (4, 5), (5, 6), (0, 6))
    check_geometry(layout(7, edges))
    assert layers_of(7, edges) == [0, 0, 1, 2, 0, 1, 3]


def test_a_symmetric_graph_is_drawn_without_crossings() -> None:
    place = layout(5, ((0, 2), (1, 3), (2, 4), (3, 4)))
    y = {box.stage: box.y for box in place.boxes}
    assert y[0] == pytest.approx(y[2]) and y[1] == pytest.approx(y[3]) and y[4] == pytest.approx((y[2] + y[3]) / 2)


def test_bands_name_each_other() -> None:
    n = 30
    place = layout(n, tuple((s, s + 1) for s in range(n - 1)))
    check_geometry(place)
    stubs = [r for r in place.routes if r.partners]
    assert stubs and len([r for r in stubs if r.leaving]) == len([r for r in stubs if not r.leaving])
    assert len({round(box.y) for box in place.boxes}) == -(-n // 8)


def test_one_stage() -> None:
    place = layout(1, ())
    check_geometry(place)


def test_separate_keeps_order_and_distance() -> None:
    out = separate([5.0, 0.0, 0.0], [2.0, 2.0])
    assert [b - a for a, b in pairwise(out)] == pytest.approx([2.0, 2.0])
    assert sum(out) / 3 == pytest.approx(5 / 3)
    assert separate([0.0, 10.0], [2.0]) == [0.0, 10.0]


def test_a_label_that_would_cover_another_is_left_out() -> None:
    routes = layout(8, [(0, t) for t in range(1, 8)], 1320.0).routes
    assert _with_room(routes, 100.0) == list(routes)
    crowded = [replace(route, label=(100.0, LABEL_HEIGHT * 0.6 * n)) for n, route in enumerate(routes)]
    assert _with_room(crowded, 100.0) == crowded[::2]
    beside = [replace(route, label=(LABEL_WIDTH * n, 0.0)) for n, route in enumerate(routes)]
    assert _with_room(beside, 100.0) == beside
