"""The cards of this machine as a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpp.cluster import GLOO_COLLECTIVE_EFFICIENCY, Cluster, Device, Devices, Link
from gpp.errors import InvalidConfig, counted
from gpp.runtime.cards.links import Identity, Speeds, speeds
from gpp.runtime.devices import cuda_devices
from gpp.settings import Count, Positive, arguments

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
    used = -(-wanted // workers_per_card)
    seen = [_properties(card) for card in range(used)]
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


def _properties(card: int) -> Any:
    import torch

    return torch.cuda.get_device_properties(card)


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
