"""How workers meet: what is bound, what is refused, whose clock counts."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from gpp.errors import InvalidConfig, WorkerFailed
from gpp.runtime.devices import address_of, check_interface
from gpp.runtime.transport.network import clock_offset_s, interface_of, meet, open_store
from tests.support.inprocess import in_threads
from tests.support.machines import listening


def job(launch: str = "external", interface: str = "lo", startup_timeout_s: float = 5.0) -> Any:
    settings = SimpleNamespace(launch=launch, interface=interface, startup_timeout_s=startup_timeout_s)
    return SimpleNamespace(settings=settings)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def run_dir(folder: Path, program: str = "samples 4\n") -> Path:
    (folder / "job").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "job" / "program.txt").write_text(program)
    return folder


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match=r"engine.interface=eth99: .* has no such network interface; there are .*lo"):
        check_interface("eth99")
    assert interface_of("lo") == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    with pytest.raises(InvalidConfig, match="nothere0"):
        interface_of("lo")


def test_an_interface_without_an_address_is_refused() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(InvalidConfig, match="has no IPv4 address"):
        address_of("nothere0")


def test_workers_meet_through_the_run_directory_on_the_named_interface_only(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "a")
    stores = in_threads([lambda rank=rank: open_store(job(), folder, rank, 2) for rank in (0, 1)])
    found = json.loads((folder / "ranks" / "store.json").read_text())
    assert {address for address, port in listening() if port == found["port"]} == {"127.0.0.1"}
    stores[1].set("x", "y")
    assert stores[0].get("x") == b"y"


def test_one_machine_opens_no_port(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "a")
    stores = in_threads([lambda rank=rank: open_store(job("local"), folder, rank, 2) for rank in (0, 1)])
    stores[1].set("x", "y")
    assert stores[0].get("x") == b"y"
    assert (folder / "ranks" / "rendezvous").exists()


def test_a_master_address_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    with pytest.raises(InvalidConfig, match=r"is not the address of engine.interface=lo"):
        open_store(job(), run_dir(tmp_path / "a"), 0, 2)


def test_who_does_not_come_and_who_read_another_job_are_named(tmp_path: Path) -> None:
    same, other = run_dir(tmp_path / "a"), run_dir(tmp_path / "b", "samples 5\n")
    store = HashStore()
    with pytest.raises(WorkerFailed, match=r"ranks 1, 2 have not come within 0.2 s"):
        meet(job(startup_timeout_s=0.2), same, store, 0, 3)

    def late(rank: int, folder: Path, into: list[str]) -> Callable[[], None]:
        def call() -> None:
            try:
                meet(job(), folder, store, rank, 2)
            except WorkerFailed as error:
                into.append(str(error))

        return call

    said: list[str] = []
    store = HashStore()
    in_threads([late(0, same, said), late(1, same, said)])
    assert said == []
    store = HashStore()
    in_threads([late(0, same, said), late(1, other, said)])
    assert len(said) == 2
    assert all("worker 1 failed: read another job" in words for words in said)


def test_clocks_of_other_machines_are_set_right() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    shifts = {0: 0.0, 1: 0.0, 2: 1234.5, 3: -77.0}
    boots = {0: 5, 1: 5, 2: 6, 3: 7}

    def measure(rank: int) -> float:
        time.sleep(0.05 * (rank == 0))
        return clock_offset_s(store, rank, 4, boots[rank], lambda: time.perf_counter() - shifts[rank])

    start = time.perf_counter()
    found = in_threads([lambda rank=rank: measure(rank) for rank in range(4)])
    took_s = time.perf_counter() - start
    assert found[:2] == [0.0, 0.0]
    # An offset is known to the time that the messages take.
    assert found == pytest.approx(list(shifts.values()), abs=took_s)
