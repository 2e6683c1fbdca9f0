"""Seconds, bytes and plain numbers as short text for people: three significant digits and a unit."""

from __future__ import annotations

import math


def seconds(value: float | None) -> str:
    """A duration given in seconds, three significant digits: `12.3 ms`."""
    if value is None or not math.isfinite(value):
        return "–"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor:
            return f"{significant(value / factor)} {unit}"
    return "0 ms" if value == 0 else f"{significant(value / 1e-9)} ns"


def num_bytes(value: float | None) -> str:
    """An amount of memory in decimal units: `1.50 GB`."""
    if value is None or not math.isfinite(value):
        return "–"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{significant(value / factor)} {unit}"
    return f"{value:.0f} B"


def significant(value: float | None, digits: int = 3) -> str:
    """A plain number with `digits` significant digits and no exponent: `1,230`, `0.0123`."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    # Of the rounded value: 0.9999 has as many digits as 1.
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))))
    return f"{value:,.{min(decimals, 9)}f}"
