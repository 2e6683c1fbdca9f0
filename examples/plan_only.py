"""A plan for a cluster that you do not have: the time of a step there, the memory of each device, and the best chain beside it.

    python examples/plan_only.py

The model lies on the meta device, without weights, so a model of any size is planned on a laptop. Nothing runs: what operators
take follows from their FLOPs and bytes (`gpp.Analytical`), and the numbers of the cards from their data sheets.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpp
from gpp.errors import Infeasible

A100 = gpp.Device(
    kind="cuda",
    memory_bytes=40e9,
    peak_flop_per_s={"float32": 19.5e12, "bfloat16": 312e12},
    memory_bandwidth_bytes_per_s=1.555e12,
    efficiency=0.6,
    kernel_latency_s=5e-6,
)
NVLINK = gpp.Link(latency_s=8e-6, bandwidth_bytes_per_s=300e9)


def cards(count: int, memory_bytes: float = 40e9) -> gpp.Cluster:
    """A machine with so many of them, of which a training may take so much memory."""
    return gpp.uniform(name="a100", num_nodes=1, devices_per_node=count, device=A100, intra_node=NVLINK, memory_bytes=memory_bytes)


class Towers(nn.Module):
    """Encoders of video, sound and text, and a trunk over all three."""

    def __init__(self, width: int = 2048, layers: int = 4) -> None:
        super().__init__()

        def tower(depth: int) -> nn.Module:
            layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True)
            return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

        self.video, self.sound, self.text = (tower(layers) for _ in range(3))
        self.trunk = tower(2)

    def forward(self, video: Tensor, sound: Tensor, text: Tensor) -> Tensor:
        return self.trunk(torch.cat([self.video(video), self.sound(sound), self.text(text)], dim=1)).mean(1)


def main() -> dict[str, gpp.Plan]:
    """Plan as a graph and as a chain; the plans by strategy."""
    with torch.device("meta"):
        model, inputs = Towers(), {name: torch.empty(2, 64, 2048) for name in ("video", "sound", "text")}
        captured = gpp.capture_model(model, inputs, torch.empty(2, 2048), mse_loss)
    problem = gpp.problem(captured, cards(4, memory_bytes=4e9), minibatch_size=64, max_ops=24)
    plans, seconds = {}, {}
    for word in ("graphpipe", "sequential"):
        strategy = gpp.Planning(strategy=word).made
        plans[word] = plan = strategy.plan(problem)
        predicted = strategy.predict(plan, problem).metrics
        seconds[word] = predicted.iteration_s
        print(
            f"{plan}\n{predicted.iteration_s * 1e3:.0f} ms a step, at most {max(predicted.peak_memory_bytes.values()) / 1e9:.1f} GB"
        )
        print()
    print(f"as a graph a step takes {1 - seconds['graphpipe'] / seconds['sequential']:.0%} less than as the best chain")

    try:
        gpp.Planning(strategy="sequential").made.plan(replace(problem, cluster=cards(4, memory_bytes=2e9)))
    except Infeasible as error:
        print(f"with 2 GB a card: {error}")
    return plans


if __name__ == "__main__":
    main()
