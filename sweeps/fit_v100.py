"""Fit the analytical V100 of `experiment=paper` to GraphPipe's Figure 6: one column is fitted, all columns constrain.

    python -m sweeps.fit_v100              fit, and what follows over the valley of nearly equal fits
    python -m sweeps.fit_v100 --check      the residuals of the constants that conf/experiment/paper.yaml has now

The objective is the root mean square of log(predicted / published) over PipeDream's twelve throughputs (three models on
4, 8, 16 and 32 devices), predicted with our `pipedream`. Three constants of the device are sought on a grid: sustained
FLOP/s of matrix products, least seconds of a kernel, share of a link's bandwidth that an all-reduce reaches; and two
sizes that cannot be read in the paper: the samples a device of DLRM and of CANDLE-Uno. The constraint: no published
throughput, of any system at any point, may lie above what our lower bound on time allows any plan
(`gpp.planners.bounds`), for then the constants cannot be right. Twelve numbers do not tell such constants apart well,
so every setting whose error is at most `VALLEY` times the least is reported, and the speed-ups as intervals over them.

Predictions are kept in outputs/fit_v100/, under a hash of the source, so that the command goes on where it ended.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gpp.app.interrupted import leave_at_once

    leave_at_once()

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.app.experiment import Experiment
from gpp.cost.problem import Problem
from gpp.errors import GppError
from gpp.models.dotted import source_hash
from gpp.planners.bounds.lower_bound import lower_bound

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = {4: "summit_1x4", 8: "summit_2x4", 16: "summit_4x4", 32: "summit_8x4"}
FITTED, OURS, CHAIN = "pipedream_flush", "graphpipe", "sequential"
VALLEY = 1.25
"""Errors up to so many times the least count as equal: the reading error of a point is 1 to 2 %, that of the model tenfold."""

SAMPLES = {"mmt": (16,), "dlrm": (32, 64, 128), "candle_uno": (64, 128, 256, 512)}
"""Samples a device that are tried. MMT's are the paper's: its Figure 7 trains on 8 devices with 128."""

GRID = {
    "collective": (0.03, 0.3),
    "kernel_s": (160e-6, 80e-6, 320e-6, 40e-6, 20e-6),
    "flop_per_s": (40e12, 32e12, 50e12, 25e12),
}
"""The likeliest first, which cuts the rest short. At 20e12 and 16e12 nothing was left, as at 25e12; 0.1 in an all-reduce gave
the errors of 0.03."""

Figure = dict[str, dict[str, dict[int, float]]]
"""Published samples a second by model, system and number of devices."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the device that are sought."""

    flop_per_s: float
    kernel_s: float
    collective: float

    def __str__(self) -> str:
        return f"{self.flop_per_s / 1e12:g} TFLOP/s, {self.kernel_s * 1e6:g} us, {self.collective:g}"


class Point(NamedTuple):
    """A prediction: samples a second of a plan, and the devices that it uses."""

    samples_per_s: float
    devices: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants, the samples a device that fit best under them, and the root mean square of the logarithm."""

    constants: Constants
    samples: dict[str, int]
    error: float


@cache
def published() -> Figure:
    """Figure 6 as read off its pixels, from the sweep that stands beside this file."""
    sweep = yaml.safe_load((ROOT / "sweeps" / "figure6.yaml").read_text())
    figure = sweep["hydra"]["callbacks"]["sweep"]["figures"][0]["published"]
    return {
        model: {system: {int(n): float(v) for n, v in points.items()} for system, points in columns.items()}
        for model, columns in figure.items()
    }


@cache
def experiment(model: str, strategy: str, num_devices: int) -> Experiment:
    """The experiment as the sweep composes it."""
    words = ["experiment=paper", f"model={model}", f"cluster={CLUSTERS[num_devices]}", f"strategy={strategy}"]
    words += ["strategy.planner.colocate=never"] if strategy == OURS else []  # as in the paper
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return instantiate(compose("config", overrides=[*words, "strategies=[]", "name=fit"]), _convert_="all")


@cache
def problem(model: str, num_devices: int, samples: int, constants: Constants) -> Problem:
    """A point of the figure under given constants."""
    one = experiment(model, CHAIN, num_devices)
    captured, cluster = one.captured(), one.cluster
    device = replace(
        cluster.devices[0],
        peak_flop_per_s={**cluster.devices[0].peak_flop_per_s, "float32": constants.flop_per_s},
        efficiency=1.0,
        kernel_latency_s=constants.kernel_s,
    )
    return replace(
        one.problem(captured, one.op_graph(captured)),
        cluster=replace(cluster, devices=(device,) * num_devices, collective_efficiency=constants.collective),
        minibatch_size=samples * num_devices,
    )


ROOMS = (
    "cluster.py",
    "strategy.py",
    *(f"{room}/**/*.py" for room in ("cost", "graph", "plan", "planners", "schedules", "simulate")),
)
"""The source that decides a prediction for a given problem."""


class Kept:
    """Predictions on disk, by what is predicted and the content of the problem; the file is named by a hash of the source."""

    def __init__(self) -> None:
        sources = [path for room in ROOMS for path in (ROOT / "gpp").glob(room)]
        self.path = ROOT / "outputs" / "fit_v100" / f"{source_hash(sources)[7:19]}.jsonl"
        self.known: dict[str, Any] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            key, value = json.loads(line)
            self.known[key] = value

    def get(self, what: str, point: Problem, make: Callable[[], Any]) -> Any:
        """A value for a problem, made and written down where it is not known."""
        content = f"{what} {point.graph.fingerprint} {point.cluster} {point.cost} {point.minibatch_size}"
        word = f"{what.split()[0]} {hashlib.sha256(content.encode()).hexdigest()[:16]}"
        if word not in self.known:
            self.known[word] = make()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps([word, self.known[word]]) + "\n")
        return self.known[word]


@cache
def kept() -> Kept:
    """The predictions of this source."""
    return Kept()


def predicted(model: str, strategy: str, num_devices: int, samples: int, constants: Constants) -> Point | None:
    """The plan of a strategy under its own prediction; None where it has no plan."""

    bundle, point = experiment(model, strategy, num_devices).strategy, problem(model, num_devices, samples, constants)

    def make() -> tuple[float, int] | None:
        try:
            plan = bundle.plan(point)
        except GppError:  # a baseline that finds nothing, or runs out of its own limits, has no number
            return None
        return bundle.predict(plan, point, record=False).metrics.throughput_samples_per_s, plan.num_devices

    found = kept().get(f"{strategy} {bundle}", point, make)
    return Point(*found) if found else None


def allowed(model: str, samples: int, constants: Constants) -> bool:
    """Whether every published throughput of a model lies below what the lower bound on time allows."""
    for n in CLUSTERS:
        most = max(points[n] for points in published()[model].values() if n in points)
        point = problem(model, n, samples, constants)
        seconds = kept().get("bound", point, lambda point=point: lower_bound(point).iteration_s)
        if samples * n / seconds < most:
            return False
    return True


def squared(model: str, column: str, samples: int, constants: Constants, worth: float = math.inf) -> float:
    """Sum of the squared logarithms of predicted / published over one model's points; infinite once above `worth`."""
    total = 0.0
    for n, value in published()[model].get(column, {}).items():
        ours = predicted(model, column, n, samples, constants)
        total += math.log(ours.samples_per_s / value) ** 2 if ours else 4.0
        if total > worth:
            return math.inf
    return total


def fitted(constants: Constants, worth: float) -> Fit | str:
    """The best samples a device under given constants; the reason where the constraint fails or the error is above `worth`."""
    chosen: dict[str, int] = {}
    total, most = 0.0, worth**2 * 12
    for model, choices in SAMPLES.items():
        errors = {
            samples: squared(model, FITTED, samples, constants, most - total)
            for samples in choices
            if allowed(model, samples, constants)
        }
        if not errors:
            return f"{model} was published above the bound, whatever its samples"
        if min(errors.values()) == math.inf:
            return "its error is too large"
        chosen[model] = min(errors, key=lambda samples: (errors[samples], samples))
        total += errors[chosen[model]]
    return Fit(constants, chosen, math.sqrt(total / 12))


def valley() -> list[Fit]:
    """All settings of the grid that keep the constraint, with at most `VALLEY` times the least error; the best first."""
    found: list[Fit] = []
    for values in product(*GRID.values()):
        constants = Constants(**dict(zip(GRID, values, strict=True)))
        fit = fitted(constants, VALLEY * min((f.error for f in found), default=math.inf))
        print(f"  {constants}: {fit if isinstance(fit, str) else f'{fit.samples}, error {fit.error:.3f}'}", flush=True)
        found += [] if isinstance(fit, str) else [fit]
    least = min(fit.error for fit in found)
    return sorted((fit for fit in found if fit.error <= VALLEY * least), key=lambda fit: fit.error)


def configured() -> tuple[Constants, dict[str, int]]:
    """The constants that conf/experiment/paper.yaml has now, and the samples a device of the sweep."""
    cluster = experiment("mmt", CHAIN, 4).cluster
    device = cluster.devices[0]
    text = (ROOT / "sweeps" / "figure6.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("minibatch_size:"))
    pairs = (pair.partition(":") for pair in line.partition("per_device:{")[2].partition("}")[0].split(","))
    samples = {name.strip(): int(value) for name, _, value in pairs}
    return Constants(device.flop_per_s("float32"), device.kernel_latency_s, cluster.collective_efficiency), samples


def judged(constants: Constants, samples: dict[str, int]) -> Fit:
    """Given settings with their error."""
    total = sum(squared(model, FITTED, count, constants) for model, count in samples.items())
    return Fit(constants, samples, math.sqrt(total / 12))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def show_residuals(fit: Fit) -> None:
    """Every published point beside its prediction and the bound; columns other than the fitted one are predictions."""
    rows = []
    for model, columns in published().items():
        for n in CLUSTERS:
            samples = fit.samples[model]
            cells = []
            for system in (FITTED, OURS, "piper"):
                ours, value = predicted(model, system, n, samples, fit.constants), columns.get(system, {}).get(n)
                cells.append(f"{ours.samples_per_s:,.0f} ({value:,.0f})" if ours and value else f"{ours[0]:,.0f}" if ours else "–")
            bound = lower_bound(problem(model, n, samples, fit.constants)).iteration_s
            rows.append([model, n, samples * n, *cells, f"{samples * n / bound:,.0f}"])
    print("\n".join(["", *table(["model", "devices", "mini-batch", "pipedream (fitted to)", "graphpipe", "piper", "bound"], rows)]))
    for system in (FITTED, OURS, "piper"):
        points = [(m, n) for m, columns in published().items() for n in columns.get(system, {})]
        total = sum(squared(m, system, fit.samples[m], fit.constants) for m in published())
        print(f"{system}: root mean square of the logarithm {math.sqrt(total / len(points)):.3f} over {len(points)} points")


def speedups(fit: Fit, model: str) -> tuple[float, float, str]:
    """On 32 devices: graphpipe over the better of pipedream and piper, and over our own chain; devices that each uses."""
    ours, dream, piper, chain = (
        predicted(model, name, 32, fit.samples[model], fit.constants) for name in (OURS, FITTED, "piper", CHAIN)
    )
    assert ours and dream and chain  # the fit has seen a plan of each kind
    rival = max(filter(None, (dream, piper)))
    return ours[0] / rival[0], ours[0] / chain[0], f"{ours.devices}, {rival.devices}, {chain.devices}"


def show_valley(fits: list[Fit]) -> None:
    """What the settings of the valley say of the published speed-ups on 32 devices."""
    models = list(published())
    rows, values = [], {model: [] for model in models}
    for fit in fits:
        cells = []
        for model in models:
            over, chain, devices = speedups(fit, model)
            values[model].append((over, chain))
            cells.append(f"{over:.2f}, {chain:.2f} ({devices})")
        found = fit.constants
        rates = [f"{found.flop_per_s / 1e12:g}", f"{found.kernel_s * 1e6:g}", f"{found.collective:g}"]
        rows.append([*rates, ", ".join(map(str, fit.samples.values())), f"{fit.error:.3f}", *cells])
    head = ["TFLOP/s", "us a kernel", "all-reduce", "samples a device", "error", *models]
    print("\n".join(["", *table(head, rows)]))
    print("Cells: over the better of pipedream and piper, over our own best chain (devices of the three).\n")
    for model in models:
        low_high = [(min(column), max(column)) for column in zip(*values[model], strict=True)]
        figure = {system: points[32] for system, points in published()[model].items()}
        said = figure.pop(OURS) / max(figure.values())
        print(
            f"{model}: {low_high[0][0]:.2f} to {low_high[0][1]:.2f} over the published baselines' planners (published {said:.2f}), "
            f"{low_high[1][0]:.2f} to {low_high[1][1]:.2f} over our own best chain"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="no fit: the constants as they are configured")
    fits = [judged(*configured())] if parser.parse_args().check else valley()
    print(f"\nbest: {fits[0].constants}, {fits[0].samples}, error {fits[0].error:.3f}; {len(fits)} settings in the valley")
    if wrong := [model for model in published() if not allowed(model, fits[0].samples[model], fits[0].constants)]:
        print(f"a published number lies above the bound: {', '.join(wrong)}")
    show_residuals(fits[0])
    show_valley(fits)


if __name__ == "__main__":
    main()
