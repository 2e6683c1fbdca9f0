"""Workers that watch each other through the store: silence is noticed, an end is not taken for silence."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from gpp.plan.build import make_plan
from gpp.runtime.hang_detection.diagnosis import Diagnosis
from gpp.runtime.hang_detection.status import ENDED, TRAINING, Status, status_path
from gpp.runtime.hang_detection.watchdog import Watchdog
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support.graphs import chain, problem
from tests.support.programs import lower

TIMEOUT_S = 1.0


class Pair:
    """Two ranks of one process, their watches, and what these report."""

    def __init__(self, ranks: Path) -> None:
        prob = problem(chain(2), 2, 4)
        plan = make_plan(prob, "test", [(1, 1), (2, 1)], 2)
        program = lower(plan, prob.graph, OneFOneB())
        settings = SimpleNamespace(timeout_s=TIMEOUT_S, startup_timeout_s=60.0, device_kind="cpu", course=None)
        job: Any = SimpleNamespace(settings=settings, plan=plan, program=program, evaluation=None, streams=False)
        store = self.store = TCPStore("127.0.0.1", 0, None, True)
        self.status = [Status(status_path(ranks, rank)) for rank in range(2)]
        self.beating = {0, 1}
        self.reports: dict[int, Diagnosis] = {}
        dogs = [
            Watchdog(job, ranks, rank=rank, world=2, store=store, report=lambda d, rank=rank: self.reports.__setitem__(rank, d))
            for rank in range(2)
        ]
        self.on = True
        threading.Thread(target=self._beat, daemon=True).start()
        for rank, status in enumerate(self.status):
            status.begin(TRAINING, 0)
            status.at(1 - rank)
            status.waiting(True)
        for dog in dogs:
            dog.start()

    def _beat(self) -> None:
        step = 0
        while self.on:
            for rank in sorted(self.beating):
                self.status[rank].beat()
                self.status[rank].begin(TRAINING, step := step + 1)
            time.sleep(0.05)

    def end(self) -> None:
        self.on = False
        for status in self.status:
            status.enter(ENDED)
        time.sleep(0.3)


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    found = Pair(tmp_path)
    yield found
    found.end()


def test_a_rank_that_falls_silent_is_named(pair: Pair) -> None:
    time.sleep(2 * TIMEOUT_S)
    assert pair.reports == {}
    pair.beating.remove(1)
    until = time.monotonic() + 20
    while 0 not in pair.reports and time.monotonic() < until:
        time.sleep(0.05)
    assert (pair.reports[0].rank, pair.reports[0].out) == (1, (1,))
    assert "not heard of" in pair.reports[0].why


def test_a_rank_that_has_ended_is_not_missed(pair: Pair) -> None:
    pair.beating.remove(1)
    pair.status[1].enter(ENDED)
    time.sleep(0.3)
    pair.status[0].begin(TRAINING, 1)
    time.sleep(2 * TIMEOUT_S)
    assert pair.reports == {}
