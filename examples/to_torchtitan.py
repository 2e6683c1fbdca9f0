"""A plan for torchtitan: planned and predicted here, run there.

    python examples/to_torchtitan.py

Writes torchtitan's configuration, the order of its passes and PLAN.md: the layout, the predicted step and memory, and what
torchtitan does otherwise. The model here has torchtitan's names of modules; in your own program it is torchtitan's model itself.
"""

import sys
from pathlib import Path

import torch
from plan_only import cards
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpp
from gpp.app.exporting import export_plan
from gpp.export.base import ToExport
from gpp.export.torchtitan import TorchTitan


class Llama(nn.Module):
    """A language model of equal layers, with torchtitan's names."""

    def __init__(self, width: int = 512, layers: int = 8, vocabulary: int = 2048) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        layer = {"d_model": width, "nhead": 8, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleDict({str(i): nn.TransformerEncoderLayer(**layer) for i in range(layers)})
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            state = layer(state)
        return self.output(self.norm(state))


def next_token(scores: Tensor, tokens: Tensor) -> Tensor:
    """The mean over words of the cross entropy."""
    return cross_entropy(scores.flatten(0, 1), tokens.flatten())


def main(folder: str = "outputs/for_torchtitan") -> Path:
    """Plan, and write the plan for torchtitan; the folder."""
    tokens = torch.randint(2048, (2, 128))
    captured = gpp.capture_model(Llama(), {"tokens": tokens}, tokens, next_token)
    strategy = gpp.Planning(strategy="sequential planner.replication=false").made
    problem = gpp.problem(captured, cards(4), minibatch_size=32, microbatch_size=4, max_ops=None)
    asked = ToExport(model="llama", captured=captured, problem=problem, strategy=strategy, plan=strategy.plan(problem), clips=False)
    _, exported = export_plan(asked, TorchTitan(config="llama3_debugmodel", nearest=True), Path(folder), lambda e, where: None)
    print(Path(folder, "PLAN.md").read_text())
    print(f"cd {folder} && {exported.command}")
    return Path(folder)


if __name__ == "__main__":
    main(*sys.argv[1:2])
