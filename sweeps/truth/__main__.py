"""Predict published measurements from model, hardware and layout.

    python -m sweeps.truth             fit each card's constants on the rows marked so, and judge the others
    python -m sweeps.truth --sheet     no fit: the assumed shares of conf/cluster, for the same table
    python -m sweeps.truth --only vtrain   a part of it: p40_8, dgx_a100 or vtrain

Rows, sources and what is left out: sweeps/truth/rows.py and published.csv. A card has up to four constants: the shares of its data
sheet that matrix products, memory and all-reduces reach, and the least time of a kernel. They are fitted to three rows of a
card by least squares of the logarithm, on a grid that is narrowed around its best point. A second table has what zero bubble's
schedules are to 1F1B.

vTrain's rows (vtrain.csv) are of another cluster of A100s. They are predicted with the card's constants, and once more with the
share of the peak fitted to half of them and judged on the other half. Guesses without a model stand beside all speeds of GPTs:
FLOPs over devices, at the median rate of the rows that are fitted to.

Models are captured once, and kept in the cache.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from statistics import median

from sweeps.truth.predict import Constants, cluster_of, errors, flops, predict, stage_range
from sweeps.truth.rows import LEFT_OUT, MEMORY, NAMES, SCRIPTS, SOURCES, STEP, Row, rows

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

SKILL = "\n| guess | rows | median error | largest | Kendall's tau |\n|---|---|---|---|---|"


def sheet(cluster: str) -> Constants:
    """The shares that conf/cluster assumes."""
    found = cluster_of(cluster)
    device = found.devices[0]
    return Constants(device.efficiency, 1.0, device.kernel_latency_s, found.collective_efficiency)


def squared(used: tuple[Row, ...], constants: Constants) -> float:
    """Sum of the squared logarithms of predicted / published."""
    return sum(math.log(1 + error) ** 2 for error in errors(used, constants))


def fit(used: tuple[Row, ...], base: Constants, starts: dict[str, tuple[float, ...]]) -> Constants:
    """The constants that fit these rows best, of those that have starts: a grid, then its best point's neighbours at half the
    distance; the others are those of `base`."""
    names, axes = list(starts), list(starts.values())
    steps = [math.log(axis[1] / axis[0]) for axis in axes]
    best, least = base, math.inf
    for _ in range(ROUNDS + 1):
        for values in product(*axes):
            shares = {name: float(f"{min(value, MOST):.3g}") for name, value in zip(names, values, strict=True)}
            constants = replace(base, **shares)
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


def range_line(row: Row, constants: Constants) -> str:
    """A row that is not judged: it lies between two that are predicted."""
    low, high = (end.of(row) for end in stage_range(row, constants))
    error = f"{low / row.value - 1:+.1%} to {high / row.value - 1:+.1%}"
    note = f"1 stage a device to ever so many; it has {row.per_device}"
    return f"| {row.model} | {row.layout} | {row.metric} | {row.value:g} | {cell(low)} to {cell(high)} | {error} | {note} |"


def show(cluster: str, constants: Constants, fitted: bool) -> None:
    """The table of one card, and the medians over the rows that it is judged by."""
    own = [row for row in rows() if row.cluster == cluster]
    print(
        f"\n{cluster}: {constants.compute:.3g} of the peak, {constants.memory:.3g} of the memory's bandwidth, "
        f"{constants.kernel_s * 1e6:.3g} us a kernel, {constants.sums:.3g} of a link's in an all-reduce\n"
    )
    print("| model | layout; micro-batches | measured | published | predicted | error | |\n|---|---|---|---|---|---|---|")
    judged = defaultdict[str, list[float]](list)
    for row in own:
        if row.use == "range":
            print(range_line(row, constants), flush=True)
            continue
        ours = predict(row, constants).of(row)
        error = ours / row.value - 1
        note = "fitted to" if fitted and row.use == "fit" else f"over {OFF:.0%}" if abs(error) > OFF else ""
        if not (fitted and row.use == "fit"):
            judged[row.metric].append(abs(error))
        print(
            f"| {row.model} | {row.layout} | {row.metric} | {row.value:g} | {cell(ours)} | {error:+.1%} | {note} |",
            flush=True,
        )
    speeds = [found for metric, found in judged.items() if metric != MEMORY]
    if len(speeds) > 1:
        judged["all speeds"] = [error for found in speeds for error in found]
    for what, found in judged.items():
        print(f"{what}: median error {median(found):.1%}, largest {max(found):.1%}, over {len(found)} rows that are judged")
    show_skill([row for row in own if row.settings[0] == "model=gpt" and row.metric != MEMORY], constants)


def show_skill(own: Sequence[Row], constants: Constants) -> None:
    """The judged speeds of each metric beside guesses without a model, which are fitted to the same rows."""
    lines = []
    for metric in dict.fromkeys(row.metric for row in own):
        used = [row for row in own if row.metric == metric and row.use == "fit"]
        others = [row for row in own if row.metric == metric and row.use == "judge"]
        if used and others:
            lines.append(judged(f"{metric}, predicted", others, lambda row: predict(row, constants).of(row)))
            lines.append(judged(f"{metric}, FLOPs over devices", others, without_model(used)))
    if lines:
        print(SKILL, *lines, sep="\n")


def show_ratios(constants: Constants) -> None:
    """What each of zero bubble's schedules is to 1F1B: ratios of neighbouring rows, in which the error of 1F1B's level is not."""
    own = [row for row in rows() if row.source == "zero_bubble"]
    key = attrgetter("model", "minibatch", "metric")
    others = {(key(row), row.schedule): row for row in own if row.schedule != "1f1b"}
    orders = list(dict.fromkeys(order for _, order in others))
    print("\nTimes 1F1B, published, predicted\n")
    print(f"| model | micro-batches | measured | {' | '.join(NAMES[order] for order in orders)} |\n|{'---|' * (3 + len(orders))}")
    errors: dict[str, list[float]] = defaultdict(list)
    for base in (row for row in own if row.schedule == "1f1b"):
        cells, one = list[str](), predict(base, constants).of(base)
        for order in orders:
            row = others[key(base), order]
            published, ours = row.value / base.value, predict(row, constants).of(row) / one
            errors[row.metric].append(abs(ours / published - 1))
            cells.append(f"{published:.3f}, {ours:.3f} ({ours / published - 1:+.1%})")
        print(f"| {base.model} | {base.count} | {base.metric} | {' | '.join(cells)} |", flush=True)
    for what, found in errors.items():
        print(f"{what} times 1F1B: median error {median(found):.1%}, largest {max(found):.1%}, over {len(found)} ratios")


def halved(found: Sequence[Row], seed: int = 0) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Two halves of rows, by a seed."""
    first = set(random.Random(seed).sample(range(len(found)), len(found) // 2))
    return tuple(row for i, row in enumerate(found) if i in first), tuple(row for i, row in enumerate(found) if i not in first)


def without_model(used: Sequence[Row]) -> Callable[[Row], float]:
    """Guesses without a model of anything: FLOPs over devices, at the median rate of some rows of the same metric."""

    def work(row: Row) -> float:
        """FLOPs of what the metric counts, on one device: of a step, or of a sample; one where FLOPs are counted."""
        samples = row.minibatch / row.devices if row.metric == STEP else 1.0
        return samples * flops(row) if row.metric == STEP or "samples" in row.metric else 1.0

    if used[0].metric == STEP:
        rate = median(work(row) / row.value for row in used)
        return lambda row: work(row) / rate
    rate = median(work(row) * row.value for row in used)
    return lambda row: rate / work(row)


def judged(what: str, found: Sequence[Row], guess: Callable[[Row], float]) -> str:
    """A line of how far guesses are from rows, and of how well they order them: one number for all orders nothing."""
    from scipy.stats import kendalltau

    ours = [guess(row) for row in found]
    off = [abs(mine / row.value - 1) for mine, row in zip(ours, found, strict=True)]
    tau = kendalltau(ours, [row.value for row in found]).statistic
    order = "–" if math.isnan(tau) else f"{tau:.3f}"
    return f"| {what} | {len(found)} | {median(off):.1%} | {max(off):.1%} | {order} |"


def show_vtrain(constants: Constants) -> None:
    """vTrain's rows one by one, and how well they are predicted without a fit and with one constant fitted to half of them."""
    found = rows("vtrain.csv")
    used, others = halved(found)
    fitted = fit(used, constants, {"compute": STARTS["dgx_a100"]["compute"]})
    print(f"\nvTrain: {constants.compute:.3g} of the peak without a fit, {fitted.compute:.3g} as fitted to half of the rows\n")
    print("| model | layout; micro-batches | measured, ms | no fit | error | fitted | error | |\n|---|---|---|---|---|---|---|---|")
    for row in found:
        plain, better = predict(row, constants).of(row), predict(row, fitted).of(row)
        cells = [f"{cell(plain)} | {plain / row.value - 1:+.1%}", f"{cell(better)} | {better / row.value - 1:+.1%}"]
        print(
            f"| {row.model} | {row.layout} | {row.value:g} | {' | '.join(cells)} | {'fitted to' if row in used else ''} |",
            flush=True,
        )
    wide = [row for row in found if row.tensor > cluster_of(row.cluster).num_devices]
    print(SKILL)
    print(judged("no fit", found, lambda row: predict(row, constants).of(row)))
    print(judged("no fit, tensor parallelism over two nodes", wide, lambda row: predict(row, constants).of(row)))
    print(judged("no fit, the half that is judged", others, lambda row: predict(row, constants).of(row)))
    print(judged("one constant, fitted to the other half", others, lambda row: predict(row, fitted).of(row)))
    print(judged("FLOPs over devices, fitted to the other half", others, without_model(used)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sheet", action="store_true", help="no fit: the shares that conf/cluster assumes")
    parser.add_argument("--only", choices=("p40_8", "dgx_a100", "vtrain"), help="one table; fits are the same")
    asked = parser.parse_args()
    bare, only = asked.sheet, asked.only
    for cluster in STARTS:
        if only not in (None, cluster) and not (only == "vtrain" and cluster == "dgx_a100"):
            continue
        used = tuple(row for row in rows() if row.cluster == cluster and row.use == "fit")
        constants = sheet(cluster) if bare else fit(used, sheet(cluster), STARTS[cluster])
        if only != "vtrain":
            show(cluster, constants, not bare)
        if only in (None, "vtrain") and cluster == "dgx_a100":
            show_vtrain(constants)
        if only != "vtrain" and any(row.source == "zero_bubble" for row in rows() if row.cluster == cluster):
            show_ratios(constants)
    print("\nSources: " + "; ".join(f"{SOURCES[name]}" for name in SOURCES))
    print("Run as these say: " + "; ".join(SCRIPTS.values()))
    print("Left out: " + "; ".join(f"{what}: {why}" for what, why in LEFT_OUT.items()))


if __name__ == "__main__":
    main()
