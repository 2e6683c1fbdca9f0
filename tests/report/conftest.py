from __future__ import annotations

import pytest

from gpp.report.run.record import RunRecord
from tests.support.fake_runs import make_run


@pytest.fixture(scope="session", params=[4, 7, 16])
def any_run(request: pytest.FixtureRequest) -> RunRecord:
    return make_run(request.param)


@pytest.fixture(scope="session")
def run4() -> RunRecord:
    return make_run(4)
