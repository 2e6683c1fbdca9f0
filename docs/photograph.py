"""Make the README's pictures of reports, of runs that are there.

    python run.py experiment=side_by_side
    python run.py model=mmt cluster=summit_8x4 engine=emulate minibatch_size=512 steps=3
    python -m docs.photograph outputs/latest/report.html docs/report.png --to "Memory per device"

The measured times are of the machine: other programs beside the run are in the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import Browser

WIDTH = 1280


def main() -> None:
    """Open a page on a light ground and save it, down to a heading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--to", default="", help="the heading above which the picture ends; without it, the whole page")
    given = parser.parse_args()
    with Browser() as browser:
        browser.open(given.page.resolve(), WIDTH)
        height = browser.run(
            f"[...document.querySelectorAll('h2')].find(heading => heading.textContent === {given.to!r})"
            "?.getBoundingClientRect().top + scrollY"
        )
        browser.screenshot(given.picture, height)
    print(f"{given.picture}: {given.picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
