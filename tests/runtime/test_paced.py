"""Workers that take as long as slower devices would (`engine.paced`)."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpp.cluster import local
from gpp.errors import InvalidConfig
from gpp.program.kinds import Action
from gpp.runtime.transport.form import MAIN_MEMORY
from gpp.runtime.worker.build import slower
from gpp.runtime.worker.interpreter import Interpreter
from gpp.runtime.worker.seat import Seat
from tests.support.fake_transport import FakeNetwork, FakeTransport

PASS_S = 0.01


@dataclass
class Sleeps:
    """A stage whose passes take a known time."""

    def forward(self, microbatch: int) -> tuple[float, float]:
        start = time.perf_counter()
        time.sleep(PASS_S)
        return start, time.perf_counter()


class Nothing:
    """A mailbox of a stage that gets nothing."""

    def expects(self, direction: str, microbatch: int) -> bool:
        return False

    def arrive(self, direction: str, microbatch: int) -> None: ...


def passes(factor: float) -> list[float]:
    """Seconds of each of three passes, from its begin to that of the next one's, as the events have them."""
    transport = FakeTransport(FakeNetwork((), 2), 0)
    actions = [Action("F", 0, m) for m in range(3)]
    stage: Any = Sleeps()
    mailbox: Any = Nothing()
    own = Interpreter(actions, {0: stage}, {0: mailbox}, Seat(device_id=0, device=MAIN_MEMORY, transport=transport), slower=factor)
    began = time.perf_counter()
    own.run()
    took = time.perf_counter() - began
    events, _ = own.take()
    seconds = [event.end_s - event.start_s for event in events]
    assert took >= sum(seconds)
    return seconds


def test_passes_take_longer_by_the_factor() -> None:
    assert all(seconds >= 3 * PASS_S for seconds in passes(3.0))
    assert all(seconds >= PASS_S for seconds in passes(1.0))


def test_the_factor_is_that_of_the_fastest_device_of_the_plan() -> None:
    cluster = local(num_devices=3, speeds=(2.0, 1.0, 0.5))

    def job(paced: bool, devices: tuple[int, ...]) -> Any:
        plan = SimpleNamespace(work_of_device=dict.fromkeys(devices))
        return cast(Any, SimpleNamespace(settings=SimpleNamespace(paced=paced), cluster=cluster, plan=plan))

    assert [slower(job(True, (0, 1, 2)), device) for device in range(3)] == [1.0, 2.0, 4.0]
    assert slower(job(True, (1, 2)), 2) == 2.0
    assert slower(job(False, (0, 1, 2)), 2) == 1.0
    with pytest.raises(InvalidConfig, match="one speed for each of 2 devices"):
        local(num_devices=2, speeds=(1.0,))
