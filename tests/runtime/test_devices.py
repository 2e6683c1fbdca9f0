"""Devices are counted before anything starts."""

from pathlib import Path

import pytest

from gpp.cluster import Cluster, local
from gpp.errors import InvalidConfig
from gpp.runtime import devices
from gpp.runtime.devices import check_devices
from tests.support.conf import option, options
from tests.support.long import thinned
from tests.support.one_process import answered, check_only
from tests.support.wrong_settings import ENGINES

NEED_NONE = {"simulate", "emulate", "reference"}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return option("cluster", "dgx_h100")


def test_an_engine_says_how_many_devices_it_takes_here(cluster: Cluster) -> None:
    for engine, made in options("engine", ENGINES).items():
        assert made.devices_here(cluster) == (0 if engine in NEED_NONE else 1 if engine == "single" else 8), engine


@pytest.mark.parametrize("launch", ["external", "slurm", "collect"])
def test_workers_of_other_machines_are_not_counted_here(launch: str, cluster: Cluster) -> None:
    assert option("engine", "distributed", f"engine.launch={launch}").devices_here(cluster) == 0


def test_too_few_devices_are_refused_with_both_counts(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, says in ((0, "has no CUDA device"), (3, "has 3 CUDA devices")):
        monkeypatch.setattr(devices, "cuda_devices", lambda found=found: found)
        with pytest.raises(
            InvalidConfig, match=f"cluster=dgx_h100: engine=distributed needs 8 CUDA devices, and this machine {says}"
        ):
            check_devices(cluster, 8, "distributed")
    monkeypatch.setattr(devices, "cuda_devices", lambda: 8)
    check_devices(cluster, 8, "distributed")
    monkeypatch.setattr(devices, "cuda_devices", lambda: 1 / 0)  # nobody asks for cores, or for no device
    check_devices(local(num_devices=64), 64, "distributed")
    check_devices(cluster, 0, "emulate")


@pytest.mark.parametrize("engine", thinned(engine for engine in ENGINES if engine not in NEED_NONE))
def test_nothing_starts_without_the_devices(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 0)
    words = ["cluster=dgx_h100", "logger=none", f"engine={engine}", f"hydra.run.dir={tmp_path}"]
    code, out = answered(words, check_only, monkeypatch)
    text = " ".join(out.split())
    assert code == 2 and f"cluster=dgx_h100: engine={engine} needs " in text and "use engine=simulate" in text, out


def test_a_measured_cost_needs_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda: 0)
    words = ["cluster=dgx_h100", "cost=profiled", "logger=none", f"hydra.run.dir={tmp_path}"]
    code, out = answered(words, check_only, monkeypatch)
    assert code == 2 and "cost=profiled: measures on a device of cluster=dgx_h100" in " ".join(out.split()), out
