"""What a record, or two of them, come to: means, the worst and the best problems, and a verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from tests.quality.ledger import Row

WORSE = 1.005
"""A problem is worse where its predicted step is longer by more than this factor."""

WORST = 10
"""Problems that are named, either way."""


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN of none.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan


class Change(NamedTuple):
    """A problem's predicted step by a planner, after / before; infinite where only `before` has a plan, 0 where only `after`."""

    ratio: float
    planner: str
    problem: str

    @classmethod
    def of(cls, before: Row, after: Row) -> Change:
        had, has = before["status"] == "ok", after["status"] == "ok"
        ratio = after["step_s"] / before["step_s"] if had and has else math.inf if had else 0.0 if has else 1.0
        ratio = math.inf if after["status"] == "failed" else ratio
        return cls(ratio, after["planner"], after["problem"])

    def __str__(self) -> str:
        words = {math.inf: "has no plan any more", 0.0: "has a plan now"}
        return f"{words.get(self.ratio, f'{self.ratio:.4f}'):>8}  {self.planner:<16} {self.problem}"


class Verdict(NamedTuple):
    """The comparison in words, and the problems that are worse."""

    text: str
    worse: list[Change]


def compared(pairs: Sequence[tuple[Row, Row]]) -> Verdict:
    """Before and after of every problem and planner that both have been asked."""
    changes = [Change.of(*pair) for pair in pairs]
    lines = [
        f"{'':<16} {'problems':>8} {'step':>7} {'/ bound':>15} {'worse':>5} {'better':>6} {'CPU median':>10} {'CPU mean':>8}",
        f"{'':<16} {'':>8} {'':>7} {'before':>7} {'after':>7}",
    ]
    for planner in dict.fromkeys(after["planner"] for _, after in pairs):
        own = [pair for pair in pairs if pair[1]["planner"] == planner]
        both = [(b, a) for b, a in own if b["status"] == a["status"] == "ok"]
        steps = [change.ratio for change in changes if change.planner == planner]
        cpu = [a["cpu_s"] / b["cpu_s"] for b, a in both]
        lines.append(
            f"{planner:<16} {len(own):>8} {geometric_mean(a['step_s'] / b['step_s'] for b, a in both):>7.4f} "
            f"{over_bound(b for b, _ in both):>7.4f} {over_bound(a for _, a in both):>7.4f} "
            f"{sum(ratio > WORSE for ratio in steps):>5} {sum(ratio < 1 / WORSE for ratio in steps):>6} "
            f"{median(cpu) if cpu else math.nan:>10.3f} {geometric_mean(cpu):>8.3f}"
        )
    lines.append("step: geometric mean of after / before; CPU: after / before")
    ranked = sorted(changes)
    better = [change for change in ranked if change.ratio < 1][:WORST]
    longer = [change for change in reversed(ranked) if change.ratio > 1][:WORST]
    for words, some in (("The most improved", better), ("The worst", longer)):
        lines += [f"{words}, after / before:" if some else f"{words}: none", *map(str, some)]
    worse = [change for change in changes if change.ratio > WORSE]
    return Verdict("\n".join(lines), worse)


def paired(before: Iterable[Row], after: Iterable[Row]) -> list[tuple[Row, Row]]:
    """The rows that two records both have."""
    known = {(row["problem"], row["planner"]): row for row in before}
    return [(known[key], row) for row in after if (key := (row["problem"], row["planner"])) in known]


def over_bound(rows: Iterable[Row]) -> float:
    """Geometric mean of predicted step / bound, where there is one."""
    return geometric_mean(row["step_s"] / row["bound_s"] for row in rows if row.get("bound_s"))


def summed(rows: Sequence[Row]) -> str:
    """A record in a table."""
    lines = [f"{'':<16} {'problems':>8} {'plans':>5} {'infeasible':>10} {'/ bound':>8} {'simulated':>9} {'CPU s':>7} {'median':>7}"]
    for planner in dict.fromkeys(row["planner"] for row in rows):
        own = [row for row in rows if row["planner"] == planner]
        status, plans = Counter(row["status"] for row in own), [row for row in own if row["status"] == "ok"]
        cpu = [row["cpu_s"] for row in plans]
        other = "".join(f", {count} {word}" for word, count in status.items() if word not in ("ok", "infeasible"))
        lines.append(
            f"{planner:<16} {len(own):>8} {len(plans):>5} {status['infeasible']:>10} {over_bound(plans):>8.4f} "
            f"{sum(row['simulated'] for row in plans):>9} {sum(cpu):>7.1f} {median(cpu) if cpu else math.nan:>7.3f}{other}"
        )
    return "\n".join(lines)
