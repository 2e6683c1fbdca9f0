import re

import pytest

from gpp.report.draw.charts import line_chart


@pytest.mark.parametrize(("last", "points"), [(3000, True), (1_000_000, False)])
def test_the_last_number_below_a_chart_is_within_the_picture(last: int, points: bool) -> None:
    chart = str(line_chart([("loss", "black", [(0, 1.0), (last, 0.5)])], title="loss", points=points))
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+)', chart)
    (x,) = re.findall(rf'<text x="([\d.]+)"[^>]*>{last:,}<', chart)
    assert float(x) + 3.2 * len(f"{last:,}") < float(width)
