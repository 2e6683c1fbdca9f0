"""How well weights are predicted along a run, and what a prediction of a given quality is worth.

    python -m sweeps.prediction_quality measure lstm adamw 0.001     the distance that PipeOptim's predictions leave, by horizon
    python -m sweeps.prediction_quality worth lstm adamw 0.001       accuracy by the share of the distance that a prediction leaves
    python -m sweeps.prediction_quality stable                        rates that a delay and a prediction leave stable

`engine=reference` finishes a mini-batch before it begins the next one, so when it makes a forward of a delayed stage, the weights
that the backward will find are there already. Three values of a weight follow from that: `stale`, as it was when the pipeline
begins this forward; `true`, as the backward finds it; and `predicted`. Distances are over all weights of a stage, and a stage's
horizon is the number of updates between the two. In `worth`, forwards use true + share * (stale - true): a prediction with the
right direction that leaves `share` of the distance (0: synchronous training; 1: the naive pipeline). With `--noise` they use
true + share * |stale - true| * u with u a random direction: as far off, but not behind.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor

from baselines.reference.pipeline import Pipeline
from baselines.reference.stage import Table
from sweeps.accuracy import ACCURACY, GRIDS, OPTIMIZERS, Run, finish, job

Values = list[Tensor]
Use = Callable[[int, Values, Values, Values], Values]
"""(horizon, stale, true, predicted) of a forward -> what it is to use."""


def watch(table: Table, use: Use) -> None:
    """Let `use` see the weights of every forward of a stage, and choose them.

    Args:
        table: of a stage of a run with one micro-batch a mini-batch.
    """
    past: dict[int, Values] = {}
    forward, updated = table.forward, table.updated

    def note() -> None:
        past[table.version] = [master.data.clone() for master in table.masters]
        past.pop(table.version - table.position.depth, None)

    def chosen(number: int) -> Values:
        predicted = forward(number)
        before = table.policy.forward_version(table.position, number, table.start)
        if before == table.version:
            return predicted
        return use(table.version - before, past[before], past[table.version], predicted)

    def after() -> None:
        updated()
        note()

    note()
    table.forward, table.updated = chosen, after  # type: ignore[method-assign]


def flat(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """a - b as one vector."""
    return torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)])


def measure(run: Run, first: int) -> list[str]:
    """Lines of a table: by horizon, medians over the forwards from mini-batch `first` on."""
    found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    pipeline = Pipeline(*job(run))
    for stage in pipeline.stages:
        table = stage.table
        assert table

        def note(horizon: int, stale: Values, true: Values, predicted: Values, table: Table = table) -> Values:
            if table.version >= first:
                went, step = flat(true, stale), flat(predicted, stale)
                inner, length = went @ step, step @ step
                left = (flat(true, predicted).norm() / went.norm()).item()
                found[horizon].append((left, (inner / (went.norm() * length.sqrt())).item(), (inner / length).item()))
            return predicted

        watch(table, note)
    result = finish(pipeline)[ACCURACY]
    rows = []
    for horizon, values in sorted(found.items()):
        left, cosine, multiple = (median(column) for column in zip(*values, strict=True))
        rows.append(f"| {horizon} | {left:.2f} | {cosine:.2f} | {multiple:.2f} |")
    return [f"accuracy {result:.4f}", "| updates ahead | left | cosine | best multiple |", "|---|---|---|---|", *rows]


def worth(run: Run, share: float, noise: bool) -> float:
    """Accuracy where each forward's weights are `share` of the distance away from those that its backward finds."""
    pipeline = Pipeline(*job(run))
    random = torch.Generator().manual_seed(run.seed)

    def mixed(horizon: int, stale: Values, true: Values, predicted: Values) -> Values:
        if not noise:
            return [t.lerp(s, share) for s, t in zip(stale, true, strict=True)]
        out = []
        for s, t in zip(stale, true, strict=True):
            direction = torch.randn(t.shape, generator=random, dtype=t.dtype)
            out.append(t + direction * (share * (s - t).norm() / direction.norm()))
        return out

    for stage in pipeline.stages:
        if stage.table:
            watch(stage.table, mixed)
    return finish(pipeline)[ACCURACY]


def stable_rate(momentum: float, delay: int, *, share: float = 1.0, predicted: bool = False) -> float:
    """The largest rate at which SGD with momentum settles on f(w) = w^2 / 2 where gradients come late.

    v <- u v + g and w <- w - r v with g = share * w' + (1 - share) * w, where w' is the weight so many updates ago; or
    w' - r * delay * v', which is PipeOptim's, if `predicted`. Linear in (w, v) and their past, so the largest eigenvalue decides.
    """
    size = 2 * (delay + 1)  # w, v, then those of one update ago, and so on
    now, late = np.eye(size)[0], np.eye(size)[2 * delay]

    def settles(rate: float) -> bool:
        ahead = rate * delay * np.eye(size)[2 * delay + 1] if predicted else 0.0
        turn = np.eye(size, k=-2)
        turn[1] = momentum * np.eye(size)[1] + share * (late - ahead) + (1.0 - share) * now
        turn[0] = now - rate * turn[1]
        return bool(abs(np.linalg.eigvals(turn)).max() <= 1.0)

    rates = np.geomspace(1e-3, 8.0, 3000)
    unstable = [rate for rate in rates if not settles(rate)]
    return float(unstable[0])


def stable() -> list[str]:
    """Lines of a table: stable rates by delay."""
    columns = {
        "as it is": {},
        "half the lag": {"share": 0.5},
        "a quarter": {"share": 0.25},
        "predicted": {"predicted": True},
    }
    rows = ["| momentum | updates late | none late | " + " | ".join(columns) + " |", "|---" * (len(columns) + 3) + "|"]
    for momentum in (0.9, 0.0):
        for delay in (1, 3, 5, 7):
            made = [stable_rate(momentum, 0), *(stable_rate(momentum, delay, **column) for column in columns.values())]
            rows.append(f"| {momentum:g} | {delay} | " + " | ".join(f"{rate:.2g}" for rate in made) + " |")
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "worth", "stable"])
    parser.add_argument("task", nargs="?", choices=GRIDS)
    parser.add_argument("optimizer", nargs="?", choices=OPTIMIZERS)
    parser.add_argument("rate", nargs="?", type=float)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--first", type=int, default=100, help="measure from this mini-batch on")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
    parser.add_argument("--noise", action="store_true")
    words = parser.parse_args()
    if words.what == "stable":
        print(*stable(), sep="\n")
        return
    if words.rate is None:
        parser.error(f"{words.what} needs a task, an optimizer and a rate, as in lstm adamw 0.001")
    if words.what == "measure":
        for seed in words.seeds:
            print(*measure(Run(words.task, words.optimizer, "pipeoptim", words.rate, seed), words.first), sep="\n")
        return
    for share in words.shares:
        made = [worth(Run(words.task, words.optimizer, "naive", words.rate, seed), share, words.noise) for seed in words.seeds]
        print(
            f"{'noise' if words.noise else 'lag'} {share:g}: {mean(made):.4f}  {' '.join(f'{value:.4f}' for value in made)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
