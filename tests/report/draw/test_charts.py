import re

import pytest

from gpp.report.draw import text
from gpp.report.draw.charts import grouped_bars, line_chart


@pytest.mark.parametrize(("last", "points"), [(3000, True), (1_000_000, False)])
def test_the_last_number_below_a_chart_is_within_the_picture(last: int, points: bool) -> None:
    chart = str(line_chart([("loss", "black", [(0, 1.0), (last, 0.5)])], title="loss", points=points))
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+)', chart)
    (x,) = re.findall(rf'<text x="([\d.]+)"[^>]*>{last:,}<', chart)
    assert float(x) + 3.2 * len(f"{last:,}") < float(width)


def test_a_chart_without_a_bar_has_no_scale() -> None:
    def drawn(value: float | None) -> str:
        return str(grouped_bars(["even"], [("predicted", "black", [value])], text.seconds, title="time", notes=["infeasible"]))

    assert "500 ms" in drawn(1.0)
    assert " ms" not in drawn(None) and "infeasible" in drawn(None)


def test_limits_that_differ_are_named_from_the_lowest_to_the_highest() -> None:
    chart = grouped_bars(["a", "b"], [("x", "red", [3.0, 4.0])], str, title="t", limits=("at least", [1.0, 2.0]))
    same = grouped_bars(["a", "b"], [("x", "red", [3.0, 4.0])], str, title="t", limits=("at least", [2.0, 2.0]))
    assert "at least 1.0 to 2.0<" in str(chart) and "at least 2.0<" in str(same)
