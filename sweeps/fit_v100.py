"""Fit the analytical V100 to one published column: the throughput of PipeDream's plans in GraphPipe's Figure 6.

    python -m sweeps.fit_v100              fit, residuals, sensitivity
    python -m sweeps.fit_v100 --check      residuals and sensitivity of conf/cluster/summit_1x4.yaml as it is

There are twelve numbers: three models on 4, 8, 16 and 32 devices. Three continuous constants are fitted: the sustained
FLOP/s of matrix products, the least seconds of a kernel, and the share of a link's bandwidth that an all-reduce
reaches. Two more are fitted because their table in the paper cannot be read: the samples a device of DLRM and of
CANDLE-Uno. Nothing of GraphPipe's own column, of Piper's, or of another figure enters. The objective is the mean
squared logarithm of predicted / published, minimised over a grid of constants that is narrowed around its best point.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from gpp.app.experiment import Experiment
from gpp.cluster import Link
from gpp.cost.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = {4: "summit_1x4", 8: "summit_2x4", 16: "summit_4x4", 32: "summit_8x4"}
MMT_SAMPLES = 16
"""Samples a device of MMT: Figure 7 of the paper trains it on 8 devices with 128."""
SAMPLES = {"mmt": (MMT_SAMPLES,), "dlrm": (16, 32, 64), "candle_uno": (32, 64, 128, 256)}
STARTS = {
    "flop_per_s": (14e12, 18e12, 23e12, 30e12, 39e12),
    "kernel_s": (5e-6, 10e-6, 20e-6, 40e-6, 80e-6, 160e-6),
    "collective": (0.05, 0.15, 0.4, 1.0),
}
LIMITS = (math.inf, math.inf, 1.0)
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Constants:
    """The fitted constants of the device, and those that the sensitivity varies too."""

    flop_per_s: float
    kernel_s: float
    collective: float = 1.0
    inter_node: float = 1.0
    memory: float = 1.0


Samples = Mapping[str, int]


def published() -> dict[str, dict[int, float]]:
    """Figure 6's PipeDream column, from the sweep that stands beside it."""
    sweep = yaml.safe_load((ROOT / "sweeps" / "figure6.yaml").read_text())
    figure = sweep["hydra"]["callbacks"]["sweep"]["figures"][0]["published"]
    return {model: {int(n): float(v) for n, v in series["pipedream_flush"].items()} for model, series in figure.items()}


@cache
def experiment(model: str, strategy: str, num_devices: int) -> Experiment:
    """The experiment as the sweep composes it."""
    words = ["+experiment=paper", f"model={model}", f"cluster={CLUSTERS[num_devices]}", f"strategy={strategy}", "name=fit"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return instantiate(compose("config", overrides=words), _convert_="all")


@cache
def problem(model: str, num_devices: int, samples: int, constants: Constants) -> Problem:
    """A point of the figure under given constants."""
    one = experiment(model, "sequential", num_devices)
    captured = one.captured()
    cluster, wire = one.cluster, one.cluster.inter_node
    device = replace(
        cluster.devices[0],
        peak_flop_per_s={**cluster.devices[0].peak_flop_per_s, "float32": constants.flop_per_s},
        efficiency=1.0,
        kernel_latency_s=constants.kernel_s,
        memory_bytes=cluster.devices[0].memory_bytes * constants.memory,
    )
    link = Link(latency_s=wire.latency_s, bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s * constants.inter_node)
    return replace(
        one.problem(captured, one.op_graph(captured)),
        cluster=replace(cluster, devices=(device,) * num_devices, inter_node=link, collective_efficiency=constants.collective),
        minibatch_size=samples * num_devices,
    )


@cache
def throughput(model: str, strategy: str, num_devices: int, samples: int, constants: Constants) -> float | None:
    """Predicted samples per second of a strategy's plan; None where there is no plan."""
    bundle = experiment(model, strategy, num_devices).strategy
    point = problem(model, num_devices, samples, constants)
    try:
        return bundle.predict(bundle.plan(point), point, record=False).metrics.throughput_samples_per_s
    except Exception as error:  # a baseline that finds nothing, or runs out of its own limits, has no number
        print(f"  {model} {strategy} {num_devices}: {error}")
        return None


def squared_error(model: str, strategy: str, samples: int, constants: Constants, column: Mapping[int, float]) -> float:
    """Sum of the squared logarithms of predicted / published over one model's points."""
    values = [(throughput(model, strategy, n, samples, constants), value) for n, value in column.items()]
    return sum(math.log(ours / value) ** 2 if ours else 4.0 for ours, value in values)


def best_samples(
    strategy: str, constants: Constants, choices: Mapping[str, Iterable[int]], worth: float
) -> tuple[float, dict[str, int]]:
    """The samples a device that fit best under given constants, model by model, and the sum of their errors.

    Args:
        worth: a sum of errors above which the rest need not be computed.
    """
    out, total = {}, 0.0
    for model, column in published().items():
        if total >= worth:
            return math.inf, out
        errors = {samples: squared_error(model, strategy, samples, constants, column) for samples in choices[model]}
        out[model] = min(errors, key=lambda s: (errors[s], s))
        total += errors[out[model]]
    return total, out


def fit(strategy: str) -> tuple[Constants, dict[str, int]]:
    """Fit from coarse to fine: each round tries the neighbours of the best point, half as far away on a log scale."""
    axes = [list(values) for values in STARTS.values()]
    steps = [math.log(axis[1] / axis[0]) for axis in axes]
    best, found, samples = math.inf, Constants(*(axis[0] for axis in axes)), {}
    for number in range(ROUNDS + 1):
        choices = {model: (count,) for model, count in samples.items()} if number else SAMPLES
        for values in product(*axes):
            constants = Constants(*(min(float(f"{value:.2g}"), limit) for value, limit in zip(values, LIMITS, strict=True)))
            error, picked = best_samples(strategy, constants, choices, best)
            if error < best:
                best, found, samples = error, constants, picked
        print(f"round {number}: {found}, {samples}, root mean square of the logarithm {math.sqrt(best / 12):.3f}", flush=True)
        steps = [step / 2 for step in steps]
        centre = (found.flop_per_s, found.kernel_s, found.collective)
        axes = [[value * math.exp(k * step) for k in (-1, 0, 1)] for value, step in zip(centre, steps, strict=True)]
    return found, samples


def configured() -> tuple[Constants, dict[str, int]]:
    """The constants that conf/ and the sweep have now."""
    cluster = experiment("mmt", "sequential", 4).cluster
    device = cluster.devices[0]
    text = (ROOT / "sweeps" / "figure6.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("minibatch_size:"))
    pairs = line.partition("per_device:{")[2].partition("}")[0].split(",")
    return Constants(device.flop_per_s("float32"), device.kernel_latency_s, cluster.collective_efficiency), {
        name.strip(): int(value) for name, _, value in (pair.partition(":") for pair in pairs)
    }


def show_residuals(strategy: str, constants: Constants, samples: Samples) -> None:
    """Predicted, published and their ratio at the twelve points."""
    print(f"\n| model | devices | mini-batch | predicted {strategy} | published PipeDream | ratio |\n|---|---|---|---|---|---|")
    for model, column in published().items():
        for n, value in column.items():
            ours = throughput(model, strategy, n, samples[model], constants) or math.nan
            print(f"| {model} | {n} | {samples[model] * n} | {ours:,.0f} | {value:,.0f} | {ours / value:.2f} |", flush=True)


def show_sensitivity(constants: Constants, samples: Samples, rivals: Iterable[str]) -> None:
    """Speed-up of graphpipe over the best rival on 32 devices while one assumption at a time changes."""
    cases: list[tuple[str, Constants, float]] = [("as fitted", constants, 1)]
    for name, field, factors in (
        ("FLOP/s", "flop_per_s", (0.5, 2.0)),
        ("kernel seconds", "kernel_s", (0.25, 4.0)),
        ("all-reduce efficiency", "collective", (0.25, 4.0)),
        ("bandwidth between nodes", "inter_node", (0.25, 4.0)),
        ("memory", "memory", (0.5, 2.0)),
    ):
        cases += [(f"{name} × {f:g}", replace(constants, **{field: getattr(constants, field) * f}), 1) for f in factors]
    cases += [(f"mini-batch × {f:g}", constants, f) for f in (0.5, 2.0, 4.0)]
    print("\n| assumption | " + " | ".join(samples) + " |\n|---|" + "---|" * len(samples))
    for name, case, factor in cases:
        cells = [speedup(model, round(count * factor), case, rivals) for model, count in samples.items()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def show_valley(strategy: str, constants: Constants, rivals: Iterable[str]) -> None:
    """Constants that fit nearly as well: the kernel's seconds imposed, the rate and the samples fitted again."""
    models = list(published())
    print(
        "\n| kernel seconds | FLOP/s | samples a device | error | "
        + " | ".join(models)
        + " |\n|---|---|---|---|"
        + "---|" * len(models)
    )
    for factor in (0.5, 1, 2, 4, 8):
        best, found, samples = math.inf, constants, {}
        for step in range(-2, 7):
            rate = float(f"{constants.flop_per_s * 1.15**step:.2g}")
            case = replace(constants, kernel_s=constants.kernel_s * factor, flop_per_s=rate)
            error, picked = best_samples(strategy, case, SAMPLES, best)
            if error < best:
                best, found, samples = error, case, picked
        cells = [speedup(model, samples[model], found, rivals) for model in models]
        counts, error = ", ".join(map(str, samples.values())), math.sqrt(best / 12)
        head = f"| {found.kernel_s:.0e} | {found.flop_per_s:.2g} | {counts} | {error:.2f} | "
        print(head + " | ".join(cells) + " |", flush=True)


def speedup(model: str, samples: int, constants: Constants, rivals: Iterable[str]) -> str:
    """Speed-up of graphpipe over the best rival on 32 devices."""
    own = throughput(model, "graphpipe", 32, samples, constants)
    others = [v for rival in rivals if (v := throughput(model, rival, 32, samples, constants))]
    return f"{own / max(others):.2f}" if own and others else "–"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="no fit: the constants as they are configured")
    parser.add_argument("--strategy", default="pipedream_flush", help="whose predictions are held against the column")
    parser.add_argument("--rivals", default="pipedream_flush,piper", help="of graphpipe, in the table of sensitivities")
    arguments = parser.parse_args()
    constants, samples = configured() if arguments.check else fit(arguments.strategy)
    show_residuals(arguments.strategy, constants, samples)
    rivals = arguments.rivals.split(",")
    show_sensitivity(constants, samples, rivals)
    show_valley(arguments.strategy, constants, rivals)


if __name__ == "__main__":
    main()
