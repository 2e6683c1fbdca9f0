"""The largest micro-batches in two jobs of `sweeps/dawnpiper_max_batch.yaml`, by hand: no code of the planners or of the bill.

    python run.py -cd sweeps -cn dawnpiper_max_batch model=gpt,t5_large 'strategies=[pipedream_whole,vpipe_stash]'
    python -m tests.checks.largest_batches outputs/sweeps/dawnpiper_max_batch

PipeDream's for GPT-2 XL on 8 devices and for T5-large on 4, and vPipe's there; weights stashed, Adam, 16 GB. A stage at
position p from the sink has p versions of its weights, a gradient and two moments: 3 + p times their bytes. PipeDream keeps what
its layers save, p times; vPipe has at least one micro-batch of it, since a tail is computed again as one run. Layers may be cut
anywhere (parts of a layer count), nothing else is held but the loss, so that a size at which not all layers find a place fits in
no way. Exit code 1 if a planner's size is above that, or more than one below.

What a layer saves, in PyTorch, D wide, ids of L tokens, u = 4 L D bytes a sample: inputs of its norms, their outputs, queries,
keys and values, what attention gives, the MLP's middle before and behind the GELU (4 u each): 16 u with one attention, 22 u with
two. Dropout adds its noise, u for each branch, and in attention, which is not fused then, three matrices of heads L L: the
probabilities, their noise, and both multiplied.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

MEMORY = 16.0e9


@dataclass(frozen=True, slots=True)
class Part:
    """Equal layers: their number, bytes of weights and bytes saved for a sample, of one."""

    layers: float
    weights: float
    saved: float


def left_over(parts: list[Part], devices: int, b: int, loss: float, *, once: bool) -> float:
    """Layers that find no place with so many samples.

    Args:
        parts: from the source to the sink.
        loss: bytes for a sample, in the last stage.
        once: whether a stage holds what its layers save for one micro-batch, and not for each that is in flight.
    """
    left = [part.layers for part in parts]
    for position in range(1, devices + 1):
        room = MEMORY - (loss * b if position == 1 else 0.0)
        for i in reversed(range(len(parts))):
            each = parts[i].weights * (3 + position) + parts[i].saved * b * (1 if once else position)
            taken = min(left[i], max(room, 0.0) / each)
            left[i], room = left[i] - taken, room - taken * each
    return sum(left)


def gpt2_xl() -> tuple[list[Part], float]:
    """48 layers, 1,600 wide, 1,024 tokens, no dropout, and a head of its own; and the loss: logits, logarithms, gradient."""
    d, tokens, words = 1600, 1024, 50257
    layer = Part(48, 4.0 * (12 * d * d + 13 * d), 16 * 4.0 * tokens * d)
    return [Part(1, 4.0 * (words + tokens) * d, 0.0), layer, Part(1, 4.0 * words * d, 0.0)], 3 * 4.0 * tokens * words


def t5_large() -> tuple[list[Part], float]:
    """Encoder and decoder of 24 layers, 1,024 wide, 16 heads, 512 tokens, dropout; embeddings and head of their own."""
    d, tokens, words, heads = 1024, 512, 32128, 16
    u, square = 4.0 * tokens * d, 4.0 * heads * tokens * tokens
    encoder = Part(24, 4.0 * (12 * d * d + 13 * d), 18 * u + 3 * square)
    decoder = Part(24, 4.0 * (16 * d * d + 19 * d), 25 * u + 6 * square)
    embedding = Part(1, 4.0 * (words + tokens) * d, 0.0)
    return [embedding, encoder, embedding, decoder, Part(1, 4.0 * words * d, 0.0)], 3 * 4.0 * tokens * words


def largest(model: tuple[list[Part], float], devices: int, *, once: bool) -> int:
    """The largest size at which all layers find a place."""
    parts, loss = model
    fitting = takewhile(lambda b: left_over(parts, devices, b, loss, once=once) <= 0, count(1))
    return max(fitting, default=0)


CASES = (
    ("gpt", 8, "pipedream_whole", largest(gpt2_xl(), 8, once=False)),
    ("t5_large", 4, "pipedream_whole", largest(t5_large(), 4, once=False)),
    ("t5_large", 4, "vpipe_stash", largest(t5_large(), 4, once=True)),
)


def main(folder: Path) -> int:
    """Compare with the jobs of a sweep that are there."""
    wrong, jobs = 0, json.loads((folder / "jobs.json").read_text())
    for model, devices, strategy, by_hand in CASES:
        for job in jobs:
            if {f"model={model}", f"cluster.devices_per_node={devices}"} <= {*job["overrides"]}:
                found = json.loads((folder / job["folder"] / "result.json").read_text())["max_batch"]
                planned = next(one["microbatch_size"] for one in found if one["strategy"] == strategy)
                print(f"{model} on {devices}, {strategy}: planned {planned}, by hand at most {by_hand}")
                wrong += not by_hand - 1 <= planned <= by_hand
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
