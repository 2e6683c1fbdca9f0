"""Published measurements, a row each, with every setting that the sources state (published.csv, vtrain.csv)."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

SOURCES = {
    "torchgpipe": "kakaobrain/torchgpipe at a1b4ee2, docs/benchmarks.rst and benchmarks/*/main.py",
    "zero_bubble": "Qi et al., arXiv 2401.10241, Table 4",
    "megatron_1": "Narayanan et al., arXiv 2104.04473, Table 1",
    "megatron_2": "Narayanan et al., arXiv 2104.04473, Table 2",
    "vtrain": "VIA-Research/vTrain at f8dda84, data/ground_truth_multi.csv (MIT licence), half of its rows",
}
SCRIPTS = {
    "zero_bubble": "sail-sg/zero-bubble-pipeline-parallelism at f68d387 (branch arxiv), examples/pretrain_zero_bubble.sh",
    "megatron_1": "NVIDIA/Megatron-LM at f5345df, examples/sc21/run_table_1.sh",
    "megatron_2": "NVIDIA/Megatron-LM at f5345df, examples/sc21/CONFIG.sh",
    "vtrain": "VIA-Research/vTrain at f8dda84, src/model",
}
"""What says how a source's trainings were run, where its table does not.

Attention goes through its scores in all four: zero bubble's script has no `--use-flash-attn` before August 2024, Megatron-LM got
FlashAttention in December 2022 (d693034), and vTrain's softmax is a kernel of its own. The scripts leave dropout at its default of
0.1. Megatron's has the micro-batches of Table 1 and the layers of a stage. Zero bubble's has a SentencePiece tokenizer, whose words
it does not count, and ties head and embedding: 6.2B, 14.6B and 28.3B parameters, as the models are called, leave 24,000 to 32,400
words. 32,000, as such tokenizers have, is in that range, and GPT-2's 50,304 is not.
"""

LEFT_OUT = {
    "Megatron, ZeRO-3 (6 rows of Table 2)": "parameters that are sharded over data-parallel replicas are not built here",
}
"""Rows of the same tables that are not predicted, and why."""

MEMORY = "peak memory, GB"
STEP = "ms a step"
NAMES = {"interleaved_1f1b": "interleaved 1F1B", "zb_1p": "ZB-1p", "zb_2p": "ZB-2p"}
"""Schedules that a layout is said with, as their authors call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Args:
        source: key of `SOURCES`.
        model: as the source calls it.
        settings: words that compose it here.
        cluster: configuration of the hardware.
        devices, data, tensor, pipeline: devices in all, and along each dimension.
        balance: layers of each stage; torchgpipe's flat layers, or a GPT's, which may be none where there is the embedding or the
            head; empty for equal shares. With interleaving there are several times as many stages as devices along the pipeline.
        attention: whether the scores of its heads go through the memory, with kernels of their own for softmax and dropout
            (`SCRIPTS` has the sources); in one kernel (`fused`), they never do.
        loss: as it is captured, or on logits that are made float32, with a kernel for each step, as Megatron's is.
        recompute: what is computed again in a backward: nothing, a GPT's `layers`, or as torchgpipe's `checkpoint`.
        schedule: of the micro-batches; zb_1p and zb_2p split backwards, in the memory of 1F1B and in twice as much.
        microbatch: samples a replica.
        minibatch: samples between two updates, over all replicas.
        metric, value: what was measured.
        use: whether constants are fitted to it, or judged by it; `range` where a device has several stages and shares them with
            others, for which there is no schedule here, so that it is neither.
    """

    source: str
    model: str
    settings: tuple[str, ...]
    cluster: str
    devices: int
    data: int
    tensor: int
    pipeline: int
    balance: tuple[int, ...]
    attention: Literal["none", "scores", "fused"]
    loss: Literal["captured", "float32"]
    recompute: Literal["none", "layers", "always", "except_last"]
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_1p", "zb_2p"]
    microbatch: int
    minibatch: int
    metric: Literal["samples/s", "samples/s a GPU", "TFLOP/s a GPU", "peak memory, GB", "ms a step"]
    value: float
    use: Literal["fit", "judge", "range"]

    @property
    def words(self) -> dict[str, str]:
        """The settings by name."""
        return dict(word.split("=", 1) for word in self.settings)

    @property
    def per_device(self) -> int:
        """Stages of a device."""
        return len(self.balance) // self.pipeline if self.balance else 1

    @property
    def run(self) -> Row:
        """The training that was measured: the same for all that was measured of it."""
        return replace(self, metric="samples/s", value=0.0, use="judge")

    @property
    def count(self) -> int:
        """Micro-batches between two updates."""
        return -(-self.minibatch // (self.microbatch * self.data))

    @property
    def layout(self) -> str:
        """Devices along each dimension, stages and micro-batches in a few words."""
        parts = [f"{name} {count}" for name, count in (("pp", self.pipeline), ("tp", self.tensor), ("dp", self.data)) if count > 1]
        again = {"none": "", "layers": ", recomputed", "always": ", recomputed", "except_last": ", recomputed but the last"}
        how = f", {NAMES[self.schedule]}" if self.schedule in NAMES else ""
        return f"{' x '.join(parts) or '1 device'}{how}; {self.count} x {self.microbatch}{again[self.recompute]}"


@cache
def rows(table: str = "published.csv") -> tuple[Row, ...]:
    """All rows of a file, in order."""
    with (Path(__file__).parent / table).open() as file:
        return tuple(_row(found) for found in csv.DictReader(file))


def _row(found: dict[str, str]) -> Row:
    given = {
        **found,
        "settings": tuple(found["settings"].split()),
        "balance": tuple(map(int, found["balance"].split())),
        "value": float(found["value"]),
        **{name: int(found[name]) for name in ("devices", "data", "tensor", "pipeline", "microbatch", "minibatch")},
    }
    return Row(**given)  # pyright: ignore[reportArgumentType]
