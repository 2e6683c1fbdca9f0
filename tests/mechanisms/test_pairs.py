"""Every pair of mechanisms is tried: what is allowed trains as one device does (where nothing drains, as the reference engine
does), and the page has what is refused."""

from pathlib import Path

import pytest

from baselines.reference.pipeline import run_reference
from tests.mechanisms import pairs
from tests.support import inprocess


def test_every_mechanism_is_put_on_plans_and_allowed_alone() -> None:
    assert sorted(pairs.PUTS) == pairs.SHIPPED
    assert {name: pairs.meet(name).said for name in pairs.SHIPPED} == dict.fromkeys(pairs.SHIPPED, pairs.ALLOWED)


@pytest.mark.parametrize("pair", pairs.PAIRS, ids=" and ".join)
def test_what_is_allowed_trains_as_one_device_does(pair: tuple[str, str], tmp_path: Path) -> None:
    met = pairs.meet(*pair)
    assert met.said == pairs.ALLOWED or len(met.said.split()) > 5
    if met.job is None:
        return
    _, _, weights = inprocess.captured_named("mlp")
    losses, _, _ = inprocess.run(met.job, tmp_path, weights)
    turns = any(stage.stride > 1 for stage in met.job.plan.stages)
    expected, _ = (run_reference if met.job.streams and not turns else inprocess.reference_of)(met.job, weights)
    # The reference engine has no versions of the weights for each replica in turn: the losses before the first update remain.
    known = 1 if met.job.streams and turns else pairs.STEPS
    assert losses[:known] == pytest.approx(expected[:known], abs=1e-12)


def test_the_page_has_the_table() -> None:
    page = pairs.PAGE.read_text()
    assert pairs.written(page, pairs.section()) == page
