"""Make the README's pictures of reports, of runs that are there.

    python run.py experiment=side_by_side
    python run.py model=mmt cluster=summit_8x4 engine=emulate minibatch_size=512 steps=3
    python -m docs.photograph outputs/latest/report.html docs/report.png --begin "Stage graph" --to "Memory per device"

The measured times are of the machine: other programs beside the run are in the picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import Browser

WIDTH, MARGIN = 1280, 24
"""Pixels: of the page, and above the heading that a picture begins with."""


def main() -> None:
    """Open a page on a light ground and save it, down to a heading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--to", default="", help="the heading above which the picture ends; without it, the whole page")
    parser.add_argument("--begin", default="", help="the heading with which the picture begins; without it, the whole page")
    given = parser.parse_args()
    with Browser() as browser:
        browser.open(given.page.resolve(), WIDTH)
        browser.run(f"document.body.style.marginTop = `${{{MARGIN} - ({_top(given.begin)} || {MARGIN})}}px`")
        height = browser.run(_top(given.to))
        browser.screenshot(given.picture, height)
    print(f"{given.picture}: {given.picture.stat().st_size:,} bytes")


def _top(heading: str) -> str:
    """JavaScript for the pixels above a heading; NaN where there is none."""
    return (
        f"[...document.querySelectorAll('h2')].find(one => one.textContent === {heading!r})?.getBoundingClientRect().top + scrollY"
    )


if __name__ == "__main__":
    main()
