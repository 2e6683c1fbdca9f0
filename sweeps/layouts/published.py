"""Twelve layouts that people chose by hand and published, in the words in which their engines read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

ZERO_BUBBLE: Final = "Qi et al., arXiv 2401.10241, Table 4: the first and the last stage have one layer fewer"
CHUNKS: Final = "Qi et al., arXiv 2401.10241, Table 4: interleaved 1F1B with one layer a chunk"
TABLE_1: Final = "Narayanan et al., arXiv 2104.04473, Table 1; chunks: examples/sc21/run_table_1.sh of Megatron-LM at f5345df"
TABLE_2: Final = "Narayanan et al., arXiv 2104.04473, Table 2"
STRING: Final = "Megatron core's manual, --pipeline-model-parallel-layout; 61 layers and one that predicts tokens, as DeepSeek-V3"
TITAN: Final = (
    "pytorch/torchtitan at b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md, Table 5: full activation checkpointing, cards of "
    "96 GB; the ends have one layer fewer"
)
BRIDGE: Final = "NVIDIA-NeMo/Megatron-Bridge at 067f987, docs/performance-summary-archive.md"


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> tuple[str, ...]:
    """The words of a GPT; those of Llama and DeepSeek get one of their layers, widths and heads (12 h^2 parameters a layer)."""
    sizes = {"num_layers": layers, "hidden": hidden, "num_heads": heads, "vocabulary": vocabulary, "sequence": sequence}
    return ("model=gpt", "dtype=bfloat16", *(f"model.{name}={size}" for name, size in sizes.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A layout with the training that it was made for.

    Args:
        text: as its engine reads it: Megatron's string, or torchtitan's list of modules in TOML.
        model: the words that compose it.
        ranks: stages that run at a time.
        cards: of each of them: tensor-parallel ones times data-parallel ones.
        microbatch: samples, over all cards of a rank.
        recomputed: whether every layer is computed again in the backward.
        card_bytes: memory of a card; None: as the cluster has it.
    """

    name: str
    source: str
    text: str
    model: tuple[str, ...]
    cluster: Literal["dgx_a100", "dgx_h100"]
    ranks: int
    cards: int
    microbatch: int
    minibatch: int
    recomputed: bool = False
    card_bytes: float | None = None

    @property
    def chunks(self) -> int:
        """Stages of a rank, without empty ones."""
        from gpp.export.imports import layout_of

        found = layout_of(self.text)
        assert found is not None
        return -(-len(found.parts) // self.ranks)


def titan(layers: int, stages: int, degree: int) -> str:
    """torchtitan's list: equal numbers of layers, and one fewer at each end, where the embedding and the head stand."""
    each = (layers + 2) // stages
    cuts = [max(0, min(layers, each * s - 1)) for s in range(stages)] + [layers]
    rows = [[f"layers.{i}" for i in range(lo, hi)] for lo, hi in pairwise(cuts)]
    rows[0].insert(0, "embed")
    rows[-1] += ["norm", "head"]
    lines = ",\n".join("  [" + ", ".join(f'"{name}"' for name in row) + "]" for row in rows)
    return f"[parallelism]\npipeline_parallel_degree = {degree}\nmodule_fqns_per_model_part = [\n{lines}\n]\n"


SMALL, LARGE = gpt(22, 2304, 24, 32000, 1024), gpt(46, 5120, 40, 32000, 1024)
LLAMA_405B, LLAMA_70B = gpt(126, 16384, 128, 128256, 8192), gpt(80, 8192, 64, 128256, 8192)
A100, H100 = "dgx_a100", "dgx_h100"

LAYOUTS: Final = (
    Published(name="GPT 1.5B", source=ZERO_BUBBLE, text="Ett|(ttt|)*6ttL", model=SMALL, cluster=A100, ranks=8, cards=1,
              microbatch=6, minibatch=144),
    Published(name="GPT 1.5B, chunks", source=CHUNKS, text="E|(t|)*22L", model=SMALL, cluster=A100, ranks=8, cards=1,
              microbatch=6, minibatch=144),
    Published(name="GPT 14.6B", source=ZERO_BUBBLE, text="Ett|(ttt|)*14ttL", model=LARGE, cluster=A100, ranks=16, cards=1,
              microbatch=1, minibatch=48),
    Published(name="GPT 14.6B, chunks", source=CHUNKS, text="E|(t|)*46L", model=LARGE, cluster=A100, ranks=16, cards=1,
              microbatch=1, minibatch=48),
    Published(name="61 layers", source=STRING, text="Et*3|(tt|)*29,m|L", model=gpt(61, 7168, 56, 129280, 4096), cluster=H100,
              ranks=16, cards=8, microbatch=1, minibatch=64),
    Published(name="GPT 39.1B", source=TABLE_1, text="Et*24|t*24,L", model=gpt(48, 8192, 64, 51200, 2048), cluster=A100,
              ranks=2, cards=256, microbatch=128, minibatch=1536),
    Published(name="GPT 76.1B", source=TABLE_1, text="Et*5|(ttttt|)*10t*5,L", model=gpt(60, 10240, 80, 51200, 2048),
              cluster=A100, ranks=4, cards=256, microbatch=64, minibatch=1792),
    Published(name="GPT 145.6B", source=TABLE_1, text="Et*5|(ttttt|)*14t*5,L", model=gpt(80, 12288, 96, 51200, 2048),
              cluster=A100, ranks=8, cards=192, microbatch=48, minibatch=2304),
    Published(name="GPT 174.6B", source=TABLE_2, text="Et*8|(tttttttt|)*10t*8,L", model=gpt(96, 12288, 96, 51200, 2048),
              cluster=A100, ranks=12, cards=128, microbatch=16, minibatch=1536),
    Published(name="Llama 3.1 405B", source=TITAN, text=titan(126, 8, 8), model=LLAMA_405B, cluster=H100, ranks=8, cards=64,
              microbatch=32, minibatch=256, recomputed=True, card_bytes=96e9),
    Published(name="Llama 3.1 405B, chunks", source=TITAN, text=titan(126, 16, 8), model=LLAMA_405B, cluster=H100, ranks=8,
              cards=64, microbatch=32, minibatch=256, recomputed=True, card_bytes=96e9),
    Published(name="Llama 3 70B", source=BRIDGE, text="Ett|(tt|)*38ttL", model=LLAMA_70B, cluster=H100, ranks=8, cards=8,
              microbatch=2, minibatch=256),
)  # fmt: skip
"""Of torchtitan's rows the source says neither chunks nor micro-batches. Two chunks a rank are its default for Interleaved1F1B, and
as many micro-batches as ranks were its default then: idle shares of 7/15 and 7/23 make the second row 1.30 times as fast, and 128
over 100 tokens a second were measured; four times as many would make it 1.10 times."""
