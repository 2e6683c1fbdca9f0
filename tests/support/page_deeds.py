"""What readers do with a page, done in a browser; `tests/report/test_browser.py` and `tests/checks/report.py` share it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.browser import FRAMES, Browser

LAYOUT = (Path(__file__).parent / "page_layout.js").read_text()
WIDTHS = (1440, 900, 390)
SHIFT = 8


def faults(browser: Browser, page: Path, width: int, dark: bool) -> list[str]:
    """What is wrong with a page's layout in a window: words that overlap, that are too small, or that leave the page."""
    browser.open(page, width, dark=dark)
    return browser.run(LAYOUT)


def place_of(browser: Browser, which: int, row: int, index: int, panel: int = 0) -> dict[str, Any]:
    """A block of a timeline: its middle in the window, its stage, and what the record says of it."""
    return browser.run(f"""(() => {{
        const {{ panels }} = gpp.timelines[{which}], panel = panels[{panel}], {{ canvas, place }} = panel;
        canvas.scrollIntoView({{ block: "center" }});
        const box = canvas.getBoundingClientRect(), events = panel.events[{row}];
        const [stage, kind] = panel.table[events.code[{index}]];
        return {{
            x: box.left + place.x(events.start[{index}] + events.length[{index}] / 2),
            y: box.top + {row} * place.pitch + place.row / 2,
            stage, kind: panel.kinds[kind].text, microbatch: events.microbatch[{index}],
            start: events.start[{index}], length: events.length[{index}],
        }};
    }})()""")


def tip(browser: Browser) -> str:
    """The words of the box of numbers; empty while there is none."""
    return browser.run(f"{FRAMES}.then(() => (box => box.hidden ? '' : box.textContent)(document.querySelector('.tip')))")


def lit(browser: Browser) -> dict[str, list[int]]:
    """The stages that are marked: of boxes in the stage graph, of rows in tables; and of what timelines draw fully."""
    return browser.run("""({
        boxes: [...document.querySelectorAll(".wide [role=button].lit")].map((box) => Number(box.dataset.stage)),
        rows: [...document.querySelectorAll("tr.lit")].map((row) => Number(row.dataset.stage)),
        timelines: gpp.timelines[0].panels[0].links.lit ?? [],
    })""")


def window_of(browser: Browser) -> tuple[float, float, float]:
    """Seconds from, to, and of the whole, of what the first timeline shows."""
    return tuple(browser.run("(({ from, to, span }) => [from, to, span])(gpp.timelines[0].viewport)"))


def pixel(browser: Browser, row: int, index: int) -> str:
    """The colour `#rrggbb` near the foot of a block's left end, in the canvas."""
    return browser.run(f"""{FRAMES}.then(() => {{
        const {{ canvas, place, events }} = gpp.timelines[0].panels[0], density = canvas.width / canvas.clientWidth;
        const x = place.x(events[{row}].start[{index}]) + 2, y = {row} * place.pitch + place.row - 4;
        const [r, g, b] = canvas.getContext("2d").getImageData(Math.round(x * density), Math.round(y * density), 1, 1).data;
        return "#" + [r, g, b].map((each) => each.toString(16).padStart(2, "0")).join("");
    }})""")


def legend_colours(browser: Browser, name: str) -> set[str]:
    """The colours `#rrggbb` of a legend's patch, as the browser computes them."""
    found = browser.run(f"""[...document.querySelectorAll(".key span")].filter((span) => span.textContent === "{name}")
        .flatMap((span) => [...span.querySelectorAll("rect")].map((rect) => getComputedStyle(rect).fill))""")
    return {"#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", each)[:3]) for each in found if each.startswith("rgb")}


def column(browser: Browser, heading: str) -> list[str]:
    """The cells of a column of the table of stages, from top to bottom."""
    return browser.run(f"""(() => {{
        const table = document.querySelector("tr[data-stage]").closest("table");
        const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "{heading}");
        return [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
    }})()""")
