"""`cluster=local_gpus`: what is asked of torch, what is measured, kept and refused; on made-up cards."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpp import SGD, Distributed, Even, OneFOneB, Strategy
from gpp.data.digits import DigitsData
from gpp.errors import InvalidConfig
from gpp.plan.build import make_plan
from gpp.runtime import devices
from gpp.runtime.cards import local
from gpp.runtime.cards.local import CONTEXT_BYTES, SIZES, Identity, Pair, Speeds, fit, local_gpus, measure, pairs_of
from gpp.runtime.job import assemble
from gpp.runtime.worker import process
from tests.support import inprocess
from tests.support.call import call
from tests.support.conf import option
from tests.support.forked import programs_forked
from tests.support.one_process import answered, check_only

FAST = Pair(a=0, b=1, latency_s=1e-5, bandwidth_bytes_per_s=4e10)
SLOW = Pair(a=0, b=2, latency_s=2e-5, bandwidth_bytes_per_s=1e10)
FOUND = Speeds(flop_per_s={"float32": 5e13}, memory_bytes_per_s=3e12, kernel_latency_s=4e-6, pairs=(FAST, SLOW))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Identity]]:
    """Make torch show some cards; returns what was measured."""

    def show(*names: str, memory: float = 80e9) -> list[Identity]:
        asked: list[Identity] = []

        def measure(identity: Identity) -> Speeds:
            asked.append(identity)
            return FOUND if len(identity.workers) > 1 else replace(FOUND, pairs=())

        for module in (local, devices):
            monkeypatch.setattr(module, "cuda_devices", lambda: len(names))
        shown = [SimpleNamespace(name=name, total_memory=memory, uuid=f"GPU-{i}") for i, name in enumerate(names)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: shown[card])
        monkeypatch.setattr(local, "measure", measure)
        return asked

    return show


def test_all_cards_with_what_was_found_and_measured_once(cards: Any, tmp_path: Path) -> None:
    asked = cards("H100", "H100", "H100")
    cluster = local_gpus(cache_dir=str(tmp_path))
    assert (cluster.num_devices, set(cluster.nodes), cluster.homogeneous) == (3, {0}, True)
    device = cluster.devices[0]
    assert (device.kind, device.memory_bytes) == ("cuda", 80e9 - CONTEXT_BYTES)
    assert device.peak_flop_per_s == {"float32": 5e13} and device.memory_bandwidth_bytes_per_s == 3e12
    # Any two stages may be neighbours: the slowest link counts.
    assert (cluster.intra_node.latency_s, cluster.intra_node.bandwidth_bytes_per_s) == (2e-5, 1e10)
    assert local_gpus(cache_dir=str(tmp_path)) == cluster and len(asked) == 1
    assert asked[0].workers == (0, 1, 2) and asked[0].backend == "nccl"
    # Fewer cards, or others, are another measurement; a damaged file is none.
    assert local_gpus(cache_dir=str(tmp_path), num_devices=2).num_devices == 2 and len(asked) == 2
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace("4", "5"))
    assert local_gpus(cache_dir=str(tmp_path)) == cluster and len(asked) == 3


def test_workers_of_one_card_share_its_memory_and_send_through_gloo(cards: Any, tmp_path: Path) -> None:
    asked = cards("H100")
    cluster = local_gpus(cache_dir=str(tmp_path), workers_per_card=4)
    assert cluster.num_devices == 4
    assert cluster.devices[0].memory_bytes == 20e9 - CONTEXT_BYTES
    assert asked[0].workers == (0, 0) and asked[0].backend == "gloo"
    assert cluster.collective_efficiency < 1.0


def test_one_card_alone_has_no_link_to_measure(cards: Any, tmp_path: Path) -> None:
    asked = cards("H100")
    assert local_gpus(cache_dir=str(tmp_path)).num_devices == 1
    assert asked[0].workers == (0,)


@pytest.mark.parametrize(
    ("names", "words", "says"),
    [
        ((), {}, r"cluster=local_gpus: torch shows no CUDA device on this machine \(torch .*\). Fix: use cluster=local"),
        (("A", "A"), {"num_devices": 3}, r"cluster.num_devices=3: this machine has 2 cards. .*engine.workers_per_card=2"),
        (
            ("A",),
            {"num_devices": 5, "workers_per_card": 4},
            r"this machine has 1 card of 4 workers. .*=4 or less.*workers_per_card=5",
        ),
        (("A", "B"), {}, r"has cards that differ \(A, B\).*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_not_there_is_refused_before_a_process_starts(
    cards: Any, tmp_path: Path, names: tuple[str, ...], words: dict[str, int], says: str
) -> None:
    asked = cards(*names)
    with pytest.raises(InvalidConfig, match=says):
        local_gpus(cache_dir=str(tmp_path), **words)
    assert not asked


def test_the_option_is_refused_here_and_composes_where_there_are_cards(cards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cards("H100", "H100")
    assert option("cluster", "local_gpus", "name=test").num_devices == 2
    shared = option("cluster", "local_gpus", "name=test", "engine.workers_per_card=3", "cluster.num_devices=5")
    assert (shared.num_devices, shared.devices[0].memory_bytes) == (5, pytest.approx(80e9 / 3 - CONTEXT_BYTES))
    assert option("cluster", "local_gpus", "name=test", "engine=simulate").num_devices == 2
    assert [identity.backend for identity in asked] == ["nccl", "gloo"]
    cards()
    code, out = answered(["cluster=local_gpus", "logger=none"], check_only, monkeypatch)
    assert code == 2 and "cluster=local_gpus: torch shows no CUDA device" in " ".join(out.split())


@given(latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e12), seed=st.integers(0, 1000))
def test_a_fit_finds_the_link_in_spite_of_busy_moments(latency: float, bandwidth: float, seed: int) -> None:
    rng = random.Random(seed)
    times = {n: (latency + n / bandwidth) * rng.uniform(1.0, 1.01) for n in SIZES}
    busy = rng.choice(SIZES)
    times[busy] *= 5.0
    found_latency, found_bandwidth = fit(times)
    # What a message of any size takes is what counts: where the latency is nothing beside the bytes, it is not known.
    for n in SIZES:
        if n >= 1 << 16:
            assert found_latency + n / found_bandwidth == pytest.approx(latency + n / bandwidth, rel=0.5)
    assert found_bandwidth > 0 and found_latency >= 0


def test_a_fit_of_constant_or_falling_times_is_still_a_link() -> None:
    for times in ({1 << 12: 1e-3, 1 << 20: 1e-3, 1 << 24: 1e-3}, {1 << 20: 2e-3, 1 << 24: 1e-3}):
        latency, bandwidth = fit(times)
        assert latency >= 0 and 0 < bandwidth < float("inf")


def test_every_process_is_in_a_pair_and_all_are_joined() -> None:
    for count in range(2, 20):
        pairs = pairs_of(range(count))
        assert len(pairs) == (count * (count - 1) // 2 if count <= 4 else 2 * count - 3)
        assert {rank for pair in pairs for rank in pair} == set(range(count)) and all(a < b for a, b in pairs)


def here(sizes: tuple[int, ...], workers: int) -> Identity:
    """Cores of this machine in place of cards."""
    return Identity(
        kind="cpu",
        cards=("core",) * workers,
        workers=tuple(range(workers)),
        backend="gloo",
        torch_version=torch.__version__,
        runtime_version="",
        sizes=sizes,
    )


@pytest.mark.dist
def test_the_measurement_itself_between_processes_of_this_machine() -> None:
    """All of it but the card: the processes, the messages, the rates, the fit; and why a measurement failed."""
    call(__name__, "measured")


def measured() -> None:
    with programs_forked():
        found = measure(here((1 << 12, 1 << 16, 1 << 20, 1 << 22), 2))
        broken = replace(here((1 << 12,), 1), backend="nccl", kind="cuda")
        with pytest.raises(InvalidConfig, match=r"cluster=local_gpus: the speed of its cards could not be measured \(.+\)"):
            measure(broken)
    assert [(pair.a, pair.b) for pair in found.pairs] == [(0, 1)]
    assert 0 <= found.link.latency_s < 0.1 and 1e6 < found.link.bandwidth_bytes_per_s < 1e12
    assert set(found.flop_per_s) == {"float32", "float64", "float16", "bfloat16"} and min(found.flop_per_s.values()) > 0
    assert found.memory_bytes_per_s > 0 and found.kernel_latency_s > 0


def test_workers_are_told_their_card_and_that_they_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LOCAL_RANK 5 of two workers a card is on card 2; it may have half of its memory."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("device", device.index)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: done.append(("memory", part)))
    monkeypatch.setattr(torch.autograd, "set_detect_anomaly", lambda on: done.append(("anomalies", on)))
    monkeypatch.setattr(process, "check_devices", lambda cluster, count, engine: done.append(("cards", count)))
    monkeypatch.setattr(process, "_keep_alive", lambda status: None)
    monkeypatch.setattr(process.os, "_exit", lambda code: done.append(("code", code)))
    for name, value in {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "settings.json").write_text("{}")
    settings = SimpleNamespace(threads=1, device_kind="cuda", workers_per_card=2, on_nonfinite="trace")
    job: Any = SimpleNamespace(settings=settings, cluster=None)
    process.guarded(tmp_path, lambda *place: done.append(("run", place[-1].index)), job)
    assert done == [("anomalies", True), ("cards", 3), ("device", 2), ("memory", 0.5), ("run", 2), ("code", 0)]


def test_a_shared_card_is_said_plainly_counted_once_and_run_by_gloo(cards: Any, tmp_path: Path) -> None:
    cards("H100")
    cluster = local_gpus(cache_dir=str(tmp_path), workers_per_card=2)
    shared, alone = Distributed(workers_per_card=2), Distributed()
    assert (shared.devices_here(cluster), alone.devices_here(cluster)) == (1, 2)
    plan: Any = SimpleNamespace(num_devices=2, stages=(), mechanisms=())
    assert any("2 workers share a card: their messages go by gloo" in words for words in shared.check(plan))
    assert not any("share a card" in words for words in alone.check(plan))
    for engine, backend in ((shared, "gloo"), (alone, "nccl")):
        job = job_on(cluster, engine)
        assert (job.settings.backend, job.settings.workers_per_card) == (backend, engine.workers_per_card)
    with pytest.raises(InvalidConfig, match=r"engine.workers_per_card=2: cluster=\w+ has no cards to share"):
        shared.refuse(job_on(option("cluster", "local_4"), shared))


def job_on(cluster: Any, engine: Distributed) -> Any:
    _, cap, _ = inprocess.captured_named("digits")
    problem = replace(inprocess.problem_of(cap, 2, 16), cluster=cluster)
    half = (1 << problem.graph.num_ops // 2) - 1
    plan = make_plan(problem, "test", [(half, 1), (problem.graph.all_mask & ~half, 1)], 8, chain=True)
    strategy = Strategy(name="test", planner=Even(), schedule=OneFOneB())
    own = {"data": DigitsData(), "model": None, "steps": 1, "dtype": "float64", "seed": 0, "train_samples": 16}
    return assemble(cap, problem, plan, strategy, optimizer=SGD(lr=0.1, momentum=0.9), **own, **engine.worker_settings)
