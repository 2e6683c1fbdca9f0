"""`python -m gpp.runtime.cards.link_worker FOLDER RANK`: one process that measures a card, and its links to others'.

FOLDER/task.json is a `gpp.runtime.cards.local.Identity` with the pairs to measure; FOLDER/rank_N.json is what came out.
Messages go as in training: between cards by NCCL, between workers of one card by gloo over pinned main memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from gpp.files import write_text

ROUNDS = 5
SPAN_S = 0.02
"""A timing goes on for about so long."""


def main(folder: Path, rank: int) -> None:
    """The whole process."""
    task = json.loads((folder / "task.json").read_text())
    world, cuda = len(task["workers"]), task["kind"] == "cuda"
    device = torch.device("cuda", task["workers"][rank]) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # One process of a card measures its rates, alone there.
    found: dict[str, Any] = {"rates": rates(device) if task["workers"].index(task["workers"][rank]) == rank else None, "links": []}
    if world > 1:
        store, limit = FileStore(str(folder / "store"), world), timedelta(seconds=120)
        bound = device if task["backend"] == "nccl" else None
        dist.init_process_group(task["backend"], store=store, rank=rank, world_size=world, timeout=limit, device_id=bound)
        for number, pair in enumerate(task["pairs"]):
            # One pair at a time: they share what is between them.
            _meet(store, f"at/{number}", world)
            if rank in pair:
                times = {n: message_s(pair, rank, n, device, staged=cuda and task["backend"] == "gloo") for n in task["sizes"]}
                found["links"] += [[*pair, times]] if rank == pair[0] else []
            _meet(store, f"done/{number}", world)
    write_text(folder / f"rank_{rank}.json", json.dumps(found), exact=True)
    if world > 1:
        dist.destroy_process_group()


def _meet(store: FileStore, key: str, world: int) -> None:
    store.add(key, 1)
    while store.add(key, 0) < world:
        time.sleep(0.001)


def message_s(pair: tuple[int, int], rank: int, num_bytes: int, device: torch.device, *, staged: bool) -> float:
    """Seconds of one message between the two processes that call this; the median of some rounds there and back.

    Args:
        staged: by pinned main memory.
    """
    first, peer = rank == pair[0], pair[1] if rank == pair[0] else pair[0]
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory() if staged else tensor

    def send() -> None:
        dist.send(tensor.cpu() if staged else tensor, peer)

    def receive() -> None:
        dist.recv(host, peer)
        if staged:
            tensor.copy_(host, non_blocking=True)
            _finish(device)

    def there_and_back(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            for step in (send, receive) if first else (receive, send):
                step()
        _finish(device)
        return (time.perf_counter() - begin) / (2 * count)

    # Both must agree on the number: it follows from the size, not from a clock.
    count = max(2, min(50, (1 << 22) // num_bytes))
    there_and_back(2)
    return statistics.median(there_and_back(count) for _ in range(ROUNDS))


def rates(device: torch.device) -> dict[str, Any]:
    """Speeds of one device: large matrix products by type, a copy, and a small operator."""
    size = 4096 if device.type == "cuda" else 256
    flops = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        n = size // 4 if dtype == torch.float64 else size
        matrix = torch.ones(n, n, device=device, dtype=dtype)
        out = torch.empty_like(matrix)
        flops[str(dtype).removeprefix("torch.")] = 2 * n**3 / _seconds(lambda a=matrix, b=out: torch.mm(a, a, out=b), device)
    source = torch.zeros((1 << 28) if device.type == "cuda" else (1 << 22), dtype=torch.uint8, device=device)
    target, small = torch.empty_like(source), torch.zeros(16, device=device)
    return {
        "flop_per_s": flops,
        "memory_bytes_per_s": 2 * source.numel() / _seconds(lambda: target.copy_(source), device),
        "kernel_latency_s": _seconds(lambda: small.add_(1.0), device, least=200),
    }


def _seconds(call: Callable[[], object], device: torch.device, *, least: int = 2) -> float:
    """Seconds of a call among many, without waiting for each; the median of some rounds."""

    def run(count: int) -> float:
        _finish(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _finish(device)
        return (time.perf_counter() - begin) / count

    run(2)
    count = max(least, min(1000, int(SPAN_S / max(run(least), 1e-9))))
    return statistics.median(run(count) for _ in range(ROUNDS))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
