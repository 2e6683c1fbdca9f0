"""A recommender on two devices: dense features go through towers, words through tables, and the towers run side by side.

    python examples/recommender.py

The clicks are drawn by a rule that the model has to find: a user clicks where taste and thing agree, and the context adds to it.
"""

import sys
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gpp

USERS, ITEMS, DENSE, SIZE = 500, 300, 32, 256


class Recommender(nn.Module):
    """Four towers (user, item, context, history) whose products are what the click depends on, as in DLRM."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)

        def tower(size: int) -> nn.Module:
            sizes = [size, *[width] * layers]
            return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.LayerNorm(a), nn.GELU(), nn.Linear(a, b))))

        self.user, self.item, self.context, self.history = tower(width), tower(width), tower(DENSE), tower(width)
        self.top = nn.Sequential(nn.Linear(6 + width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: Tensor, item: Tensor, context: Tensor, history: Tensor) -> Tensor:
        towers = [
            self.user(self.users(user)),
            self.item(self.items(item)),
            self.context(context),
            self.history(self.items(history).mean(1)),
        ]
        pairs = [(a * b).sum(1) for i, a in enumerate(towers) for b in towers[i + 1 :]]
        return self.top(torch.cat([torch.stack(pairs, 1), towers[2]], 1)).squeeze(1)


def clicks(batches: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Mini-batches of (inputs by name, clicks)."""
    taste, kind = torch.randn(USERS), torch.randn(ITEMS)
    out = []
    for _ in range(batches):
        user, item = torch.randint(USERS, (SIZE,)), torch.randint(ITEMS, (SIZE,))
        inputs = {"user": user, "item": item, "context": torch.randn(SIZE, DENSE), "history": torch.randint(ITEMS, (SIZE, 8))}
        out.append((inputs, (taste[user] * kind[item] + inputs["context"][:, 0] > 0).float()))
    return out


def main(folder: str = "outputs/recommender", *, steps: int = 120) -> float:
    """Train on drawn clicks; the share of other clicks that is told right."""
    torch.manual_seed(0)
    train, test = (data := clicks(200))[:-1], data[-1]
    right = {"right": lambda scores, click: ((scores > 0).float() == click).float().mean()}
    with gpp.parallelize(
        Recommender(),
        *test,
        loss=gpp.Loss(function=binary_cross_entropy_with_logits, metrics=right),
        optimizer=gpp.Adam(lr=3e-3),
        strategy=gpp.Planning(strategy="graphpipe", cost=gpp.Analytical()),
        run=gpp.Run(folder=folder),
    ) as pipeline:
        print(pipeline)
        pipeline.train(train, steps)
        found = pipeline.evaluate(*test)
    print(f"{found['right']:.0%} of the clicks of users and things that it has not seen together are told right")
    return found["right"]


if __name__ == "__main__":
    main(*sys.argv[1:2])
