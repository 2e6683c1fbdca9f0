"""The cards of this machine as a cluster, with their speeds: measured once, kept by the cards' identity.

`gpp.runtime.cards.link_worker` is one process of the measurement.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal, final

from gpp.cluster import GLOO_COLLECTIVE_EFFICIENCY, Cluster, Device, Devices, Link
from gpp.errors import InvalidConfig, counted
from gpp.files import TemporaryFolder, open_binary, write_text
from gpp.runtime.devices import cuda_devices
from gpp.serialization import check_sealable, seal, to_json, unseal
from gpp.settings import Count, Positive, arguments

SIZES = tuple(1 << n for n in range(12, 27, 2))
"""Bytes of the messages: 4 KiB to 64 MiB."""

SMALL, LARGE = 1 << 16, 1 << 20
"""Up to the one a message's time is mostly latency, from the other on mostly bandwidth."""

LIMIT_S = 300.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a measurement depends on.

    Args:
        cards: name and unique id of each card.
        workers: the card of each process that measures.
        backend: of the messages.
    """

    kind: Literal["cpu", "cuda"]
    cards: tuple[str, ...]
    workers: tuple[int, ...]
    backend: Literal["gloo", "nccl"]
    torch_version: str
    runtime_version: str
    sizes: tuple[int, ...] = SIZES


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The link between two of the processes that measured."""

    a: int
    b: int
    latency_s: float
    bandwidth_bytes_per_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What was measured.

    Args:
        flop_per_s: of large matrix products, by type.
        memory_bytes_per_s: read and written in a copy.
        kernel_latency_s: of one small operator among many.
        pairs: none for a single process.
    """

    flop_per_s: dict[str, float]
    memory_bytes_per_s: float
    kernel_latency_s: float
    pairs: tuple[Pair, ...] = ()

    @property
    def link(self) -> Link:
        """The slowest of the links, since any two stages may be neighbours; a copy on the card where there is none."""
        if not self.pairs:
            return Link(latency_s=self.kernel_latency_s, bandwidth_bytes_per_s=self.memory_bytes_per_s)
        slowest = max(self.pairs, key=lambda pair: (pair.latency_s + LARGE / pair.bandwidth_bytes_per_s, pair.a, pair.b))
        return Link(latency_s=slowest.latency_s, bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s)


def fit(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) of `time = latency + bytes / bandwidth`, from the times of some sizes.

    Repeated medians of slopes, and a median of offsets, so that a size in a busy moment changes nothing. Source: Siegel,
    "Robust regression using repeated medians", 1982.

    Args:
        seconds: bytes -> time of one message; two sizes at least.
    """
    large = [item for item in sorted(seconds.items()) if item[0] >= LARGE]
    points = large if len(large) > 1 else sorted(seconds.items())
    slope = median(median((t - s) / (n - m) for m, s in points if m != n) for n, t in points)
    # Where noise hides the slope, the largest message bounds it.
    slope = slope if slope > 0 else points[-1][1] / points[-1][0]
    small = [item for item in seconds.items() if item[0] <= SMALL] or sorted(seconds.items())[:1]
    return max(0.0, median(t - n * slope for n, t in small)), 1.0 / slope


def pairs_of(workers: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs to measure: all of up to four processes, else each with the next one and with the first."""
    count = len(workers)
    if count <= 4:
        return list(combinations(range(count), 2))
    return sorted({(0, i) for i in range(1, count)} | {(i, i + 1) for i in range(count - 1)})


def speeds(identity: Identity, cache_dir: Path) -> Speeds:
    """The speeds, from the cache if these very cards were measured before.

    Raises:
        InvalidConfig: a process of the measurement failed, or the cache cannot be written.
    """
    path = cache_dir.expanduser() / f"{hashlib.sha256(to_json(identity).encode()).hexdigest()[:16]}.json"
    found = unseal(Speeds, path)
    if found is None:
        check_sealable(path, "cache_dir")
        found = measure(identity)
        seal(path, found, "cache_dir")
    return found


def measure(identity: Identity) -> Speeds:
    """Measure in processes of their own, one for each entry of `identity.workers`.

    Raises:
        InvalidConfig: one failed.
    """
    with closing(TemporaryFolder("links")) as made:
        folder, world = made.path, len(identity.workers)
        write_text(folder / "task.json", json.dumps(asdict(identity) | {"pairs": pairs_of(identity.workers)}), exact=True)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                with open_binary(folder / f"rank_{rank}.log") as log:
                    words = [sys.executable, "-m", "gpp.runtime.cards.link_worker", str(folder), str(rank)]
                    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
                    processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world)]
    found = [(a, b, fit({int(n): t for n, t in times.items()})) for one in said for a, b, times in one["links"]]
    pairs = tuple(Pair(a=a, b=b, latency_s=latency, bandwidth_bytes_per_s=rate) for a, b, (latency, rate) in sorted(found))
    # The slowest of the cards: a plan may put any stage on it.
    rates = [one["rates"] for one in said if one["rates"]]
    return Speeds(
        flop_per_s={dtype: min(rate["flop_per_s"][dtype] for rate in rates) for dtype in rates[0]["flop_per_s"]},
        memory_bytes_per_s=min(rate["memory_bytes_per_s"] for rate in rates),
        kernel_latency_s=max(rate["kernel_latency_s"] for rate in rates),
        pairs=pairs,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well.

    Raises:
        InvalidConfig: one has not; repeats the last line that it said.
    """
    until = time.monotonic() + LIMIT_S
    while None in (codes := [process.poll() for process in processes]) or any(codes):
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or time.monotonic() > until:
            text = (folder / f"rank_{failed or 0}.log").read_text(errors="replace").strip().splitlines()
            why = f"not done within {LIMIT_S:g} s" if failed is None else text[-1] if text else f"exit code {codes[failed]}"
            fix = "give cluster.device and cluster.link, as conf/cluster/dgx_h100.yaml does; then nothing is measured"
            raise InvalidConfig("cluster", "local_gpus", f"the speed of its cards could not be measured ({why})", fix)
        time.sleep(0.05)


CONTEXT_BYTES = 1e9
"""Memory that CUDA and NCCL take for each process, beside torch's tensors; as in conf/cluster."""


@arguments("cluster")
def local_gpus(
    *,
    cache_dir: str,
    name: str = "local_gpus",
    num_devices: Devices | None = None,
    workers_per_card: Count = 1,
    memory_bytes: Positive | None = None,
    device: Device | None = None,
    link: Link | None = None,
) -> Cluster:
    """The CUDA (or ROCm) cards that torch shows on this machine; what is not given is asked or measured, once.

    Args:
        cache_dir: where measurements are kept, by the cards' identity.
        num_devices: None for all cards, each as often as it has workers.
        workers_per_card: as the engine's setting of the same name; a device is that part of a card's memory.
        memory_bytes: memory of one device, in place of the card's.
        device: in place of the measured one.
        link: in place of the measured one, between any two devices.

    Raises:
        InvalidConfig: there is no card, there are too few, or they differ.
    """
    cards = cuda_devices()
    if not cards:
        rule = f"torch shows no CUDA device on this machine ({_build()})"
        fix = "use cluster=local, whose devices are cores; or plan with a described cluster, as cluster=dgx_h100"
        raise InvalidConfig("cluster", name, rule, fix)
    wanted = num_devices or cards * workers_per_card
    if wanted > cards * workers_per_card:
        have = counted(cards, "card") + (f" of {workers_per_card} workers" if workers_per_card > 1 else "")
        fix = (
            f"set cluster.num_devices={cards * workers_per_card} or less, or engine.workers_per_card={-(-wanted // cards)}, "
            "which shares a card between workers (their messages then go by gloo over main memory)"
        )
        raise InvalidConfig("cluster.num_devices", wanted, f"this machine has {have}", fix)
    import torch

    seen = [torch.cuda.get_device_properties(card) for card in range(-(-wanted // workers_per_card))]
    if device is None and len({card.name for card in seen}) > 1:
        rule = f"has cards that differ ({', '.join(dict.fromkeys(card.name for card in seen))}), and operators are measured on one"
        raise InvalidConfig(
            "cluster", name, rule, "name equal ones in CUDA_VISIBLE_DEVICES, or describe the cluster (gpp.cluster.mixed)"
        )
    if device is None or (link is None and wanted > 1):
        found = speeds(_identity(seen, wanted, workers_per_card), Path(cache_dir))
        device, link = device or _device(seen[0], found), link or found.link
    if memory_bytes is None:
        memory_bytes = max(min(card.total_memory for card in seen) / workers_per_card - CONTEXT_BYTES, CONTEXT_BYTES / 4)
    between = link or Link(latency_s=0.0, bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s)
    return Cluster(
        name=name,
        devices=(replace(device, memory_bytes=memory_bytes),) * wanted,
        nodes=(0,) * wanted,
        intra_node=between,
        inter_node=between,
        collective_efficiency=GLOO_COLLECTIVE_EFFICIENCY if workers_per_card > 1 else 1.0,
    )


def _build() -> str:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    return f"torch {torch.__version__} for {built or 'processors only'}"


def _identity(seen: list[Any], wanted: int, workers_per_card: int) -> Identity:
    """Who measures: a process on each card; two on the first one, if workers share it."""
    import torch

    cards = list(range(len(seen)))
    workers = cards if workers_per_card == 1 else [0, *cards] if wanted > 1 else [0]
    return Identity(
        kind="cuda",
        cards=tuple(f"{card.name} {getattr(card, 'uuid', '')}".strip() for card in seen),
        workers=tuple(workers),
        backend="nccl" if workers_per_card == 1 else "gloo",
        torch_version=torch.__version__,
        runtime_version=torch.version.cuda or torch.version.hip or "",
    )


def _device(card: Any, found: Speeds) -> Device:
    return Device(
        kind="cuda",
        memory_bytes=float(card.total_memory),
        peak_flop_per_s=found.flop_per_s,
        memory_bandwidth_bytes_per_s=found.memory_bytes_per_s,
        kernel_latency_s=found.kernel_latency_s,
    )
