"""Compiled code against the same files as plain Python: equal on random programs, and how much faster.

    python -m tests.checks.compiled [--count 10000] [--first 0]

`--count` programs of random plans are walked by both, and the plans are predicted, timed and searched from by both: every time,
event and draw is equal, to the last bit. Ends with 1 where nothing is compiled.
"""

from __future__ import annotations

import sys

from gpp import compiled
from tests.support.options import options
from tests.support.twins import Compared, compare

PLANS = 40
"""Random plans of a problem."""


def main() -> int:
    given = options(__doc__, count=10_000, first=0)
    if not compiled.KNOWN:
        print("nothing is compiled, or files have changed since: python setup.py build_ext --inplace")
        return 1
    every, seed = dict[str, Compared](), given.first
    while not every or every["program"].count < given.count:
        for part, found in compare(seed, PLANS).items():
            whole = every.setdefault(part, Compared())
            whole.count += found.count
            whole.compiled_s += found.compiled_s
            whole.plain_s += found.plain_s
        seed += 1
    print(f"{seed - given.first} problems\n{'':<12}{'equal':>8} {'compiled ms':>12} {'plain ms':>10} {'ratio':>7}")
    for part, whole in every.items():
        fast, slow = (1e3 * seconds / whole.count for seconds in (whole.compiled_s, whole.plain_s))
        print(f"{part:<12}{whole.count:>8} {fast:>12.4f} {slow:>10.4f} {slow / fast:>7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
