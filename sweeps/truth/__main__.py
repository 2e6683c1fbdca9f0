"""Predict published measurements from model, hardware and layout.

    python -m sweeps.truth             fit each card's constants on the rows marked so, and judge the others
    python -m sweeps.truth --sheet     no fit: the assumed shares of conf/cluster, for the same table

Rows, sources and what is left out: sweeps/truth/rows.py and published.csv. A card has up to four constants: the shares of its data
sheet that matrix products, memory and all-reduces reach, and the least time of a kernel. They are fitted to three rows of a
card by least squares of the logarithm, on a grid that is narrowed around its best point.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from statistics import median

from sweeps.truth.predict import Constants, cluster_of, errors, predict
from sweeps.truth.rows import LEFT_OUT, SOURCES, Row, rows

STARTS: dict[str, dict[str, tuple[float, ...]]] = {
    "p40_8": {"compute": (0.35, 0.5, 0.7, 1.0), "memory": (0.3, 0.42, 0.6, 0.85)},
    "dgx_a100": {"compute": (0.45, 0.55, 0.67, 0.82), "memory": (0.35, 0.5, 0.7, 1.0), "sums": (0.3, 0.6, 1.0)},
}
"""Where the search begins. A P40's rows have no all-reduce; kernels of 40 images at once hardly feel their launch, so that is not
fitted."""

ROUNDS = 3
MOST = 1.0
"""No share is above the data sheet's."""

OFF = 0.25
"""An error that needs an explanation."""


def sheet(cluster: str) -> Constants:
    """The shares that conf/cluster assumes."""
    found = cluster_of(cluster)
    device = found.devices[0]
    return Constants(device.efficiency, 1.0, device.kernel_latency_s, found.collective_efficiency)


def squared(used: tuple[Row, ...], constants: Constants) -> float:
    """Sum of the squared logarithms of predicted / published."""
    return sum(math.log(1 + error) ** 2 for error in errors(used, constants))


def fit(cluster: str, used: tuple[Row, ...]) -> Constants:
    """The constants of a card that fit these rows best: a grid, then its best point's neighbours at half the distance."""
    names = list(STARTS[cluster])
    axes = list(STARTS[cluster].values())
    steps = [math.log(axis[1] / axis[0]) for axis in axes]
    base = sheet(cluster)
    best, least = base, math.inf
    for _ in range(ROUNDS + 1):
        for values in product(*axes):
            shares = {name: float(f"{min(value, MOST):.3g}") for name, value in zip(names, values, strict=True)}
            constants = Constants(**{"compute": base.compute, "memory": 1.0, "kernel_s": base.kernel_s, "sums": base.sums} | shares)
            error = squared(used, constants)
            if error < least:
                best, least = constants, error
        steps = [step / 2 for step in steps]
        axes = [
            tuple(getattr(best, name) * math.exp(k * step) for k in (-1, 0, 1)) for name, step in zip(names, steps, strict=True)
        ]
    return best


def cell(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def show(cluster: str, constants: Constants, fitted: bool) -> None:
    """The table of one card, and the medians over the rows that it is judged by."""
    own = [row for row in rows() if row.cluster == cluster]
    print(
        f"\n{cluster}: {constants.compute:.3g} of the peak, {constants.memory:.3g} of the memory's bandwidth, "
        f"{constants.kernel_s * 1e6:.3g} us a kernel, {constants.sums:.3g} of a link's in an all-reduce\n"
    )
    print("| model | layout; micro-batches | measured | published | predicted | error | |\n|---|---|---|---|---|---|---|")
    judged: dict[bool, list[float]] = {True: [], False: []}
    for row in own:
        ours = predict(row, constants).of(row)
        error = ours / row.value - 1
        note = "fitted to" if fitted and row.use == "fit" else f"over {OFF:.0%}" if abs(error) > OFF else ""
        if row.microbatch is None:
            ends = [predict(row, constants, samples).of(row) for samples in (1, row.minibatch // row.data)]
            note += f" ({cell(ends[0])} with 1 sample, {cell(ends[1])} with all at once)"
        if not (fitted and row.use == "fit"):
            judged[row.metric == "peak memory, GB"].append(abs(error))
        print(
            f"| {row.model} | {row.layout} | {row.metric} | {row.value:g} | {cell(ours)} | {error:+.1%} | {note.strip()} |",
            flush=True,
        )
    for memory, found in judged.items():
        if found:
            what = "peak memory" if memory else "speed"
            print(f"{what}: median error {median(found):.1%}, largest {max(found):.1%}, over {len(found)} rows that are judged")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sheet", action="store_true", help="no fit: the shares that conf/cluster assumes")
    bare = parser.parse_args().sheet
    for cluster in STARTS:
        used = tuple(row for row in rows() if row.cluster == cluster and row.use == "fit")
        show(cluster, sheet(cluster) if bare else fit(cluster, used), not bare)
    print("\nSources: " + "; ".join(f"{SOURCES[name]}" for name in SOURCES))
    print("Left out: " + "; ".join(f"{what}: {why}" for what, why in LEFT_OUT.items()))


if __name__ == "__main__":
    main()
