"""Other devices at work while one is measured.

The cores of a machine share caches, memory and the power budget: an operator takes longer beside a busy core than
alone. Where the devices of a cluster are cores of one machine, operators are therefore measured beside as many busy
cores as the run will have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

WORK = """
import os, sys, torch
parent = int(sys.argv[1])  # not os.getppid(): the parent may have died already
torch.set_num_threads(1)
layer = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
x = torch.randn(64, 512)
layer(x).sum().backward()
print("busy", flush=True)
while os.getppid() == parent:
    layer(x).sum().backward()
    layer.zero_grad()
"""
"""Forwards and backwards of 2 MB of weights: products, copies and additions, as a stage of a model has them."""


@contextmanager
def companions(count: int) -> Iterator[tuple[int, ...]]:
    """`count` processes of one thread that compute from the beginning to the end of the block, which gets their ids."""
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", WORK, str(os.getpid())], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield tuple(process.pid for process in processes)
