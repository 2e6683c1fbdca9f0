"""What two records differ in, and whether somebody meant it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.same.cases import MEANT, Meant

NEAR = 1e-12
"""Relative difference of a prediction that is rounding."""
PREDICTED = ("predicted", "result", "emulation", "compared")
SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which two records of a case differ; `relative` for numbers."""

    case: str
    field: str
    before: object
    after: object
    relative: float | None = None

    def meant(self, table: tuple[Meant, ...]) -> Meant | None:
        """The entry that says so."""
        return next((m for m in table if re.search(m.case, self.case) and re.search(m.field, self.field)), None)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of JSON, with dotted paths; a list of plain values is a leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        yield from flat({str(i): inner for i, inner in enumerate(value)}, prefix)
    else:
        yield prefix, value


def relative(before: object, after: object) -> float | None:
    """Relative difference of numbers, the largest one of lists of them; None where there is none."""
    if isinstance(before, list) and isinstance(after, list) and before and len(before) == len(after):
        every = [relative(a, b) for a, b in zip(before, after, strict=True)]
        return None if any(one is None for one in every) else max(one for one in every if one is not None)
    if isinstance(before, bool) or isinstance(after, bool):
        return None
    if isinstance(before, int | float) and isinstance(after, int | float):
        return abs(after - before) / max(abs(before), abs(after), 1e-300)
    return None


def differences(
    case: str, before: dict[str, Any], after: dict[str, Any], texts: tuple[Path, Path] | None = None
) -> list[Difference]:
    """All differences of two records of a case: plan, program and losses exactly, predictions up to rounding.

    What the later record has and the earlier one lacks is no difference.

    Args:
        texts: the folders of both records' programs.
    """
    out: list[Difference] = []
    kept = ("exit", "status", *PREDICTED, "plan", "loss", "loss_terms", "final_metric", "versions", "answers")
    old, new = ({key: record[key] for key in kept if key in record} for record in (before, after))
    now = dict(flat(new))
    for name, value in flat(old):
        other = now.get(name, "nothing")
        if value == other:
            continue
        far = relative(value, other)
        if far is None or far > NEAR or not name.startswith(PREDICTED):
            out.append(Difference(case=case, field=name, before=value, after=other, relative=far))
    more = set(new.get("plan", {}).get("stages", {})) - set(old.get("plan", {}).get("stages", {}))
    if more and "plan" in old:
        out.append(Difference(case=case, field="plan.stages", before="nothing", after=f"also {', '.join(sorted(more))}"))
    return out + _program(case, before, after, texts)


def _program(case: str, before: dict[str, Any], after: dict[str, Any], texts: tuple[Path, Path] | None) -> list[Difference]:
    """The first action in which two programs differ."""
    old, new = before.get("program"), after.get("program")
    if old == new:
        return []
    files = [folder / "programs" / f"{name}.txt" for folder, name in zip(texts or (), (old, new), strict=False)]
    if len(files) < 2 or not all(file.exists() for file in files):
        return [Difference(case=case, field="program", before=old, after=new)]
    first, second = (file.read_text().split() for file in files)
    if first == second:
        return []
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    shown = (" ".join([*words[at : at + 3], "..."]) for words in (first, second))
    place = f"program at word {at} of {len(first)}"
    return [Difference(case=case, field=place, before=next(shown), after=next(shown))]


def report(before: dict[str, dict], after: dict[str, dict], texts: tuple[Path, Path] | None = None) -> tuple[list[str], int]:
    """Lines for the user, and the number of differences that nobody meant, missing cases among them.

    Args:
        before, after: records by case; of `before`, those alone that `after` has or should have.
    """
    lines: list[str] = []
    meant: dict[str, set[str]] = defaultdict(set)
    unmeant, cases, worst_loss, runs = 0, 0, 0.0, 0
    for case, old in before.items():
        new = after.get(case)
        if new is None:
            lines += [case, "    was not run"]
            unmeant += 1
            continue
        found = differences(case, old, new, texts)
        runs += bool(old.get("loss"))
        worst_loss = max([worst_loss, *(abs(a - b) for a, b in zip(old.get("loss", ()), new.get("loss", ()), strict=False))])
        for one in found:
            if entry := one.meant(MEANT):
                meant[entry.reason].add(case)
        open_ones = [one for one in found if not one.meant(MEANT)]
        if not open_ones:
            continue
        cases, unmeant = cases + 1, unmeant + len(open_ones)
        lines.append(case)
        lines += [_line(one) for one in open_ones[:SHOWN]]
        lines += [f"    and {len(open_ones) - SHOWN} more"] if len(open_ones) > SHOWN else []
        if new.get("reason") and new["reason"] != old.get("reason"):
            lines.append(f"    reason now: {new['reason'][-400:]}")
    lines += [f"meant in {len(names)} cases: {reason}" for reason, names in meant.items()]
    lines += [f"{field}: in {count} cases" for field, count in _groups(before, after, texts)] if cases > 1 else []
    trained = f"; {runs} real runs, largest difference of a loss {worst_loss:.1e}" if runs else ""
    lines.append(f"{len(before)} cases: {len(before) - cases} the same or as meant, {cases} differ in {unmeant} fields{trained}")
    return lines, unmeant


def _line(one: Difference) -> str:
    far = "" if one.relative is None else f"  ({one.relative:.2e})"
    return f"    {one.field:<44} {_short(one.before):>24} -> {_short(one.after)}{far}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _groups(before: dict[str, dict], after: dict[str, dict], texts: tuple[Path, Path] | None) -> list[tuple[str, int]]:
    """How many cases differ in a field, numbers of stages and devices left out of its name; most first."""
    found: dict[str, set[str]] = defaultdict(set)
    for case in before.keys() & after.keys():
        for one in differences(case, before[case], after[case], texts):
            if not one.meant(MEANT):
                found[re.sub(r"\.\d+", ".N", one.field.partition(" at ")[0])].add(case)
    return sorted(((field, len(cases)) for field, cases in found.items()), key=lambda pair: (-pair[1], pair[0]))
