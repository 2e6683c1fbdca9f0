"""What a split backward costs on Transformers, beside a whole one: medians of passes in turn, in one process.

    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 python -m tests.checks.split_speed --width 256

(Workers have these settings, with which memory that is let go of stays the process's.) Exit code 1 if both halves take more than
1.1 of the whole backward, or a forward that prepares for them more than 1.05 of one that does not. Seconds are those that the
process computes, so other programs are not in them.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict

import torch

from gpp.capture.stage import build_stage
from gpp.mechanisms.split_backward.operators import late_of, split
from tests.support import inprocess
from tests.support.conf import model_named
from tests.support.options import options

MOST = {"forward": 1.05, "backward": 1.1}


def ratios(name: str, samples: int, rounds: int, width: int) -> dict[str, float]:
    """Split over whole, of a forward and of a backward, of a model as one stage in float32."""
    model = model_named(name, f"model.hidden={width}")
    captured, state = inprocess.capture(model, "float32")
    rows = inprocess.data_of(model).load("train", model, seed=0, dtype="float32").fetch(torch.arange(samples) % 32)
    nodes = [node for op in captured.graph.ops for node in op.nodes]
    both = {way: build_stage(captured, nodes, device="cpu") for way in ("whole", "split")}
    for module in both.values():
        module.load(state)
    split(both["split"])
    gc.collect()
    gc.freeze()  # as workers do
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds + 2):
        for way in sorted(both, reverse=bool(number % 2)):
            module = both[way]
            start = time.process_time()
            made = [value for key, value in module(samples, rows).items() if key in module.results]
            middle = time.process_time()
            torch.autograd.backward(made)
            if way == "split":
                late_of(module).take().deliver()
            end = time.process_time()
            del made
            if number >= 2:
                seen["forward", way].append(middle - start)
                seen["backward", way].append(end - middle)
    middle = {key: statistics.median(values) for key, values in seen.items()}
    took = ", ".join(f"{what} {way} {seconds * 1e3:.1f} ms" for (what, way), seconds in middle.items())
    found = {what: middle[what, "split"] / middle[what, "whole"] for what in MOST}
    print(f"{name}, {width} wide, {samples} samples: {took}; {', '.join(f'{what} {ratio:.3f}' for what, ratio in found.items())}")
    return found


def main(models: list[str], samples: int, rounds: int, width: int) -> int:
    torch.set_num_threads(1)
    found = [ratios(name, samples, rounds, width) for name in models]
    return int(any(ratio > MOST[what] for each in found for what, ratio in each.items()))


if __name__ == "__main__":
    sys.exit(main(**vars(options(__doc__, models=["gpt_small", "mmt_small"], samples=32, width=256, rounds=15))))
