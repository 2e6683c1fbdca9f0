"""Which numbers of a command's output, or of its sweep's results.csv, are the headline on docs/figures.md."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

Cells = dict[str, str]


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a headline.

    Args:
        what: what it is the number of.
        value: the number; a share where the unit is `%`.
        unit: behind the number.
        low, high: the least and the largest of several of which `value` is the median.
        beside: what this number is compared with; empty for what the headline's own text says.
    """

    what: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    beside: str = ""


Reader = Callable[[str, Path], list[Number]]
"""What the commands have printed, and the folder of their sweep -> numbers."""


def jobs(folder: Path) -> list[Cells]:
    """The jobs of a sweep that came to their end."""
    with (folder / "results.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok"]


def points(folder: Path) -> list[dict[str, Any]]:
    """The points of a sweep's first figure, with what was published beside them."""
    return [point for point in json.loads((folder / "summary.json").read_text())["figures"][0]["points"] if point["status"] == "ok"]


def spread(what: str, values: Sequence[float], unit: str = "", beside: str = "") -> Number:
    """The median of several numbers, with the least and the largest."""
    return Number(what, median(values), unit, min(values), max(values), beside)


def gains(rows: Iterable[Cells], places: Sequence[str], ours: str, others: Sequence[str], half: str) -> dict[str, list[float]]:
    """How many times as fast our strategy is as the fastest of others, by model, at each place where both have a time.

    Of measured repeats the quickest counts: what other programs of the machine add is no part of a step.
    """
    one = min if half == "measured" else median
    times: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row[f"{half}.iteration_s"]:
            at = (row["model"], *(row[place] for place in places))
            times[at][row["strategy"]].append(float(row[f"{half}.iteration_s"]))
    found = defaultdict[str, list[float]](list)
    for at, by in times.items():
        if ours in by and (known := [one(by[name]) for name in others if name in by]):
            found[at[0]].append(min(known) / one(by[ours]))
    return found


def gain_by_model(places: Sequence[str], others: Sequence[str], half: str = "predicted", ours: str = "graphpipe") -> Reader:
    """A reader: the gain of each model over its places, and of all."""

    def read(_: str, folder: Path) -> list[Number]:
        found = gains(jobs(folder), places, ours, others, half)
        numbers = [spread(model, values, "times as fast") for model, values in found.items()]
        return [*numbers, spread("all of them", [value for values in found.values() for value in values], "times as fast")]

    return read


PAPER = {"mmt": "1.12 to 1.61", "dlrm": "1.20 to 1.47", "candle_uno": "0.92 to 1.24"}
"""What GraphPipe's Figure 6 has for the same ratio, read off its pixels (sweeps/figure6.yaml)."""


def figure6(_: str, folder: Path) -> list[Number]:
    """Gains over the better of the published planners, and the gaps to the bound."""
    rows = jobs(folder)
    found = gains(rows, ["cluster"], "graphpipe_apart", ["pipedream_flush", "piper"], "predicted")
    gaps = [
        float(row["plan.optimality_gap"]) for row in rows if row["strategy"] == "graphpipe_apart" and row["plan.optimality_gap"]
    ]
    return [
        *(spread(f"{model}, 4 to 32 devices", found[model], "times as fast", f"published {PAPER[model]}") for model in found),
        spread("graphpipe's step above the lower bound", gaps, "%", "no plan is below the bound"),
    ]


def branches(_: str, folder: Path) -> list[Number]:
    """Gains over the best chain and over the systems of others, measured."""
    rows, numbers = jobs(folder), list[Number]()
    for words, others in (
        ("the best chain", ["sequential"]),
        ("the best of others' systems", ["torch_pipelining", "data_parallel", "single"]),
    ):
        found = gains(rows, [], "graphpipe", others, "measured")
        numbers.append(spread(f"over {words}", [one for values in found.values() for one in values], "times as fast"))
    return numbers


def column(what: str, name: str, unit: str, beside: str = "") -> Reader:
    """A reader: one column of a sweep."""

    def read(_: str, folder: Path) -> list[Number]:
        return [spread(what, [abs(float(row[name])) for row in jobs(folder) if row[name]], unit, beside)]

    return read


def found_in(text: str, pattern: str) -> tuple[float, ...]:
    """The numbers of the first match; those before a `%` are shares.

    Raises:
        ValueError: the text does not have it.
    """
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"what the command printed has no {pattern!r}")
    shares = [text[end : end + 2].lstrip().startswith("%") for end in (match.end(i + 1) for i in range(len(match.groups())))]
    return tuple(
        round(float(one.replace(",", "")) / 100, 9) if share else float(one.replace(",", ""))
        for one, share in zip(match.groups(), shares, strict=True)
    )


def oracle(text: str, _: Path) -> list[Number]:
    """How many problems are planned as well as the best plan there is."""
    (count,) = found_in(text, r"(\d+) problems from")
    least, middle, most, of = found_in(text, r"graphpipe / optimum: least ([\d.]+), median ([\d.]+), .*largest ([\d.]+), of (\d+)")
    (equal,) = found_in(text, r"equal: (\d+)")
    return [
        Number("problems whose plan is the best there is", equal, f"of {of:.0f} that fit, of {count:.0f}"),
        Number("step over the best one", middle, "times", least, most),
    ]


SECTION = re.compile(r"^(\w+): [\d.]+ of the peak", re.M)
SPEEDS = ("samples/s", "samples/s a GPU", "TFLOP/s a GPU")


def sections(text: str) -> dict[str, str]:
    """What sweeps.truth has printed, by card."""
    starts = [*SECTION.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return {match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}


def speeds(section: str) -> list[tuple[str, int, float, float, bool]]:
    """Model, devices in the pipeline, published and predicted speed, and whether it was fitted to, of a card's rows."""
    out = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[2] in SPEEDS and re.fullmatch(r"[\d.]+", cells[4]):
            devices = re.search(r"pp (\d+)", cells[1])
            fitted = cells[6].startswith("fitted")
            out.append((cells[0], int(devices[1]) if devices else 1, float(cells[3]), float(cells[4]), fitted))
    return out


def card(text: str, name: str, words: str) -> Number:
    """The error of the speeds of a card, with their rank correlation, and on P40s, where each model has a row that was fitted to,
    a guess that scales that row with the devices."""
    from scipy.stats import kendalltau

    found = speeds(sections(text)[name])
    judged = [row for row in found if not row[4]]
    ours, published = [row[3] for row in judged], [row[2] for row in judged]
    tau = kendalltau(ours, published).statistic
    errors = [abs(mine / theirs - 1) for mine, theirs in zip(ours, published, strict=True)]
    beside = f"tau {tau:.3f}"
    base = {model: published / devices for model, devices, published, _, fitted in found if fitted}
    if all(row[0] in base for row in judged):
        naive = [abs(base[row[0]] * row[1] / row[2] - 1) for row in judged]
        beside += f"; scaled with the devices {median(naive):.1%}, at most {max(naive):.0%}"
    return spread(f"{words}, error of {len(judged)} speeds", errors, "%", beside)


def memory_of_a100(text: str) -> Number:
    """The error of peak memory."""
    middle, most, count = found_in(text, r"(?m)^peak memory, GB: median error ([\d.]+)%, largest ([\d.]+)%, over (\d+)")
    return Number(f"A100, error of {count:.0f} peaks of memory", middle, "%", high=most)


def guesses(text: str, *names: str) -> list[Number]:
    """Lines of vTrain's last table."""
    numbers = []
    for name in names:
        count, middle, most, tau = found_in(text, rf"(?m)^\| {re.escape(name)} \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \|")
        numbers.append(
            Number(f"vTrain's A100s, {name}: error of {count:.0f} steps", middle, "%", high=most, beside=f"tau {tau:.3f}")
        )
    return numbers


def unfitted(text: str, _: Path) -> list[Number]:
    """Published measurements, with the shares of conf/cluster."""
    cards = [card(text, "p40_8", "P40"), card(text, "dgx_a100", "A100"), memory_of_a100(text)]
    return [*cards, *guesses(text, "no fit", "FLOPs over devices, fitted to the other half")]


def fitted(text: str, _: Path) -> list[Number]:
    """The same with a card's constants fitted to three rows, or to one half."""
    cards = [card(text, "p40_8", "P40"), card(text, "dgx_a100", "A100")]
    names = (
        "no fit, the half that is judged",
        "one constant, fitted to the other half",
        "FLOPs over devices, fitted to the other half",
    )
    return [*cards, *guesses(text, *names)]


def bubbles(_: str, folder: Path) -> list[Number]:
    """Bubble rates beside the published ones."""
    off = defaultdict[str, list[float]](list)
    for point in points(folder):
        kind = (
            "by a rule"
            if point["series"] in ("1F1B", "ZB-H1", "ZB-H2")
            else "interleaved"
            if "1F1B" in point["series"]
            else "by search"
        )
        off[kind].append(abs(point["ours"] - point["published"]))
    return [
        Number(
            f"orders {kind}: rates within 0.0001 of the published ones",
            sum(one <= 1e-4 for one in found),
            f"of {len(found)}",
            beside=f"the furthest is off by {max(found):.4f}",
        )
        for kind, found in off.items()
    ]


def real(text: str, _: Path) -> list[Number]:
    """Errors of predicted steps on real workers."""
    count, middle, most, within = found_in(text, r"(\d+) cases: median error ([\d.]+)%, largest ([\d.]+)%, within 15 %: ([\d.]+)%")
    taus = [float(one) for one in re.findall(r"Kendall's tau ([\d.-]+\d)", text)]
    return [
        Number(f"error of the predicted step, {count:.0f} cases", middle, "%", high=most),
        Number("cases within 15 %", within, "%"),
        spread("Kendall's tau of the plans of a model", taus),
    ]


def bill(text: str, _: Path) -> list[Number]:
    """The bill of memory beside the allocator."""
    middle, lowest, count = found_in(text, r"median error ([\d.]+)% .*lowest ([+-][\d.]+)% .*\), (\d+) workers")
    return [Number(f"error of the peak, {count:.0f} workers", middle, "%", beside=f"furthest below: {lowest:+.1%}")]


def equal(text: str, _: Path) -> list[Number]:
    """The largest differences to one device."""
    checked, bad, loss, weight = found_in(
        text, r"(\d+) runs checked, (\d+) bad; largest difference: loss ([\d.e+-]+), weight ([\d.e+-]+)"
    )
    return [
        Number("runs that differ", bad, f"of {checked:.0f}"),
        Number("largest difference of a loss", loss, beside="allowed 1e-9"),
        Number("largest difference of a weight", weight, beside="allowed 1e-8"),
    ]


def late(_: str, folder: Path) -> list[Number]:
    """Held-out accuracy by method, over the seeds."""
    found = defaultdict[str, list[float]](list)
    for row in jobs(folder):
        found[f"{row['task']}, {row['method']}"].append(float(row["final_metric.accuracy"]))
    return [Number(method, mean(values), "%", min(values), max(values)) for method, values in found.items()]


def layerpipe(_: str, folder: Path) -> list[Number]:
    """How many times as fast as PipeDream's whole layers, on VGG-16."""
    found = defaultdict[str, list[float]](list)
    for point in points(folder):
        if point["panel"] == "vgg16" and point["series"] != "PipeDream":
            found[point["series"]].append(point["ours"])
    return [
        spread(name, values, "times as fast", f"mean {mean(values):.2f}; published: mean 1.25, largest 1.80")
        for name, values in found.items()
    ]


def planning(text: str, _: Path) -> list[Number]:
    """CPU seconds of plan and bound at the largest sizes."""
    rows = re.findall(r"(?m)^(\S.*?) +(\d+) +(\d+) +[\d.]+ +([\d.]+) +([\d.]+) ", text)
    kinds = [(name.rpartition(" ")[2], *numbers) for name, *numbers in rows]
    return [
        Number(f"{kind}, {ops} x {devices}", float(plan), "CPU s", beside=f"the bound {float(bound):.3g}")
        for kind, ops, devices, plan, bound in kinds
    ]


def runtime(text: str, _: Path) -> list[Number]:
    """A step over the ideal pipeline's."""
    out = []
    for width, count, over in re.findall(r"width (\d+), (\d+) micro-batches[^\n]*\n +ours +[\d.]+ ms: ([\d.]+) of the ideal", text):
        out.append(Number(f"width {width}, {count} micro-batches", float(over), "of the ideal step"))
    return out


def thirty_two(printed: str, _: Path) -> list[Number]:
    """The steps of a graph of stages and of the best chain, and the bound, as `mode=compare` prints them in milliseconds."""
    rows = {
        "a graph of stages": r"graphpipe +([\d.]+) ms",
        "the best chain": r"sequential +([\d.]+) ms",
        "bound": r"bound ([\d.]+) ms",
    }
    return [Number(what, found_in(printed, pattern)[0], "ms") for what, pattern in rows.items()]
