"""A training as plain PyTorch has it, without end: the yardstick of runtimes. It uses nothing of the project but the network.

    python -m tests.plain_loop --width 224 --microbatches 8 --out FILE      one line a step: its start and end in seconds

The network of `model=mlp` and SGD; rows of a mini-batch are selected once from samples in memory, its micro-batches are slices
of them, and their gradients add up. One thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from gpp.models.networks.mlp import MLP

SAMPLES = 2048


def train(width: int, num_blocks: int, rows: int, microbatches: int, out: Path) -> None:
    """Train until killed.

    Args:
        rows: samples of a micro-batch.
        out: file that gets `START END` for each step, seconds of `time.perf_counter`.
    """
    torch.manual_seed(0)
    model = MLP(num_blocks=num_blocks, width=width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    inputs, targets = torch.randn(SAMPLES, width), torch.randn(SAMPLES, width)
    size, at, order = rows * microbatches, 0, torch.randperm(SAMPLES)
    with out.open("w") as log:
        while True:
            start = time.perf_counter()
            chosen, at = order[at : at + size], (at + size) % SAMPLES
            x, y = inputs.index_select(0, chosen), targets.index_select(0, chosen)
            total = torch.zeros(())
            for lo in range(0, size, rows):
                loss = F.mse_loss(model(x[lo : lo + rows]), y[lo : lo + rows]) / microbatches
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            total.item()
            print(start, time.perf_counter(), file=log, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="samples of a micro-batch")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.width, given.blocks, given.rows, given.microbatches, given.out)


if __name__ == "__main__":
    main()
