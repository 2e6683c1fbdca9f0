"""A training loop of your own on two devices: torch's optimizer and scheduler, checkpoints, and going on after a stop.

python examples/own_loop.py          give it again after Ctrl-C: it goes on from the last checkpoint
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import sys
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gpp


class Halves(nn.Module):
    """Two branches read the upper and the lower half of a digit of 8 x 8 pixels; a head joins them."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(torch.cat([self.upper(pixels[:, :32]), self.lower(pixels[:, 32:])], dim=1))


def read_digits() -> tuple[Tensor, Tensor]:
    """Pixels [1797, 64] in 0..1, and digits [1797]."""
    table = torch.from_numpy(np.loadtxt(str(files("gpp") / "data" / "digits.csv.bz2"), delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64] / 16, table[:, 64].long()


def main(folder: str = "outputs/own_loop", *, steps: int = 120) -> float:
    """Train on digits, going on from the last checkpoint if there is one; the accuracy on others."""
    torch.manual_seed(0)
    pixels, labels = read_digits()
    held_out = (pixels[-256:], labels[-256:])
    shuffled = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(pixels[:-256], labels[:-256]), 64, shuffle=True, drop_last=True, generator=shuffled)

    model = Halves()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    accuracy = {"accuracy": lambda scores, label: (scores.argmax(1) == label).float().mean()}
    with gpp.parallelize(
        model,
        *held_out,
        loss=gpp.Loss(function=cross_entropy, metrics=accuracy),
        optimizer=optimizer,
        strategy="graphpipe",
        run=gpp.Run(folder=folder, checkpoint=gpp.Checkpoints(every=50), resume="auto"),
    ) as pipeline:
        print(pipeline)
        pipeline.train(loader, steps, scheduler=scheduler)
        found = pipeline.evaluate(*held_out)
    print(f"loss {found['loss']:.3f}, accuracy {found['accuracy']:.1%} on digits that it has not seen")
    print(f"the report: {pipeline.report()}")
    return found["accuracy"]


if __name__ == "__main__":
    main(*sys.argv[1:2])
