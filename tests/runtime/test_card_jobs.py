"""Jobs for cards: their programs are in the order for cards, which is proved before a process starts and where a job is read."""

import pytest

from gpp import Flush, Stash
from gpp.errors import MalformedProgram
from gpp.program.cards import check_cards
from gpp.program.program import reduce_groups
from gpp.runtime.job import Job
from gpp.weights.base import AbstractWeights
from tests.mechanisms.weight_versions.test_worker import job_of


@pytest.mark.parametrize("weights", [Flush(), Stash()], ids=["drains", "streams"])
def test_programs_of_a_job_for_cards(weights: AbstractWeights, tmp_path) -> None:
    gloo, _ = job_of(weights, held_out=40)
    cards, _ = job_of(weights, held_out=40, device_kind="cuda")
    assert (gloo.settings.backend, cards.settings.backend) == ("gloo", "nccl")
    groups = reduce_groups(cards.plan, cards.graph)
    assert cards.evaluation is not None
    check_cards(cards.program, cards.plan, groups)
    check_cards(cards.evaluation, cards.plan, groups)
    with pytest.raises(MalformedProgram, match="on cards"):
        check_cards(gloo.program, cards.plan, groups)
    cards.save(tmp_path)
    assert Job.load(tmp_path) == cards
    (tmp_path / "job" / "program.txt").write_text(gloo.program.to_text())
    with pytest.raises(MalformedProgram, match=r"program\.txt: .*on cards"):
        Job.load(tmp_path)
