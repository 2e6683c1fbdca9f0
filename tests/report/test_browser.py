"""Pages in a real browser, one start of it: layout, and what pointer and keys do. `python -m tests.checks.report` has more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpp.report.draw import text
from gpp.report.draw.palette import branch_of, tone, value
from gpp.report.run.page import run_report
from gpp.report.run.record import RunRecord
from tests.report.run.test_host_copies import hosted_run
from tests.support.browser import Browser, executable
from tests.support.page_deeds import LAYOUT, SHIFT, column, faults, legend_colours, lit, pixel, place_of, tip, window_of

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium on this machine: pages are tested in a browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, run4: RunRecord) -> dict[str, Path]:
    folder, memory = tmp_path_factory.mktemp("pages"), hosted_run()
    written = {"run": run_report(run4), "memory": run_report(memory.knowing(strategy="s"))}
    out = {}
    for name, page in written.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(page, encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("run", 1440, False), ("run", 900, True), ("run", 390, False), ("memory", 900, False)]
)
def test_no_words_overlap_or_leave_the_page(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    assert faults(browser, pages[name], width, dark) == []
    assert browser.requests and set(browser.requests) <= {page.as_uri() for page in pages.values()}


def test_a_row_of_many_stages_keeps_its_device(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 390)
    words = browser.run("""(panel => {
        panel.rows[1].stages = Array(20).fill(10);
        panel.draw();
        return panel.labels.map(({ words }) => words);
    })(gpp.timelines[0].panels[0])""")
    assert sum(each.startswith("s") and each.endswith("… d1") for each in words) == 1, words


def test_the_check_of_layout_finds_faults(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 900)
    browser.run("""document.querySelector("h1").style.cssText = "font-size:7px;width:1000px;margin-bottom:-30px" """)
    found = " ".join(browser.run(LAYOUT))
    assert "overlap" in found and "1028 px wide" in found and "written in 7.0 px" in found


def test_pointing_shows_the_numbers_of_the_record_and_marks_the_stage(
    browser: Browser, pages: dict[str, Path], run4: RunRecord
) -> None:
    assert run4.plan is not None and run4.predicted is not None
    browser.open(pages["run"], 1440)
    device = 3
    own = sorted((e for e in run4.predicted.events if e.device == device), key=lambda e: (e.start_s, e.end_s))
    index = next(i for i, e in enumerate(own) if e.kind == "B" and e.microbatch == 2)
    event, block = own[index], place_of(browser, 0, device, index)
    browser.point(block["x"], block["y"])
    shown = tip(browser)
    assert f"stage {event.stage}: backward, micro-batch 2, device {device}" in shown
    assert (
        text.seconds(event.end_s - event.start_s) in shown and text.seconds(event.end_s) in shown and "branches.1.layers" in shown
    )
    assert lit(browser) == {"boxes": [event.stage], "rows": [event.stage], "timelines": [event.stage]}
    browser.point(2, 2)
    assert tip(browser) == "" and lit(browser) == {"boxes": [], "rows": [], "timelines": []}
    plain = pixel(browser, 0, 0)
    browser.run("document.querySelector('.wide [role=button][data-stage=\"4\"]').focus()")
    assert lit(browser)["timelines"] == [4] and "stage 4 on d4" in tip(browser)
    assert pixel(browser, 0, 0) != plain  # the block of another stage steps back
    browser.press("Enter", 13)
    browser.run("document.activeElement.blur()")
    assert lit(browser)["rows"] == [4]  # it stays
    browser.press("Escape", 27)
    assert lit(browser)["rows"] == []


def test_wheel_drag_and_keys_change_what_is_shown(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 1440)
    block = place_of(browser, 0, 2, 3)
    _, _, span = window_of(browser)
    browser.point(block["x"], block["y"], "mouseWheel", deltaX=0, deltaY=-100, modifiers=2)
    start, end, _ = window_of(browser)
    middle = block["start"] + block["length"] / 2
    assert end - start < span / 2 and start < middle < end
    again = place_of(browser, 0, 2, 3)
    assert abs(again["x"] - block["x"]) < 3  # what is under the pointer stays there; a pointer's pixels are whole ones
    browser.point(block["x"], block["y"], "mousePressed", button="left", clickCount=1)
    browser.point(block["x"] - 40, block["y"], "mouseMoved", button="left", buttons=1)
    browser.point(block["x"] - 80, block["y"], "mouseMoved", button="left", buttons=1)
    browser.point(block["x"] - 80, block["y"], "mouseReleased", button="left", clickCount=1)
    assert window_of(browser)[0] > start and lit(browser)["timelines"] == []
    browser.run("gpp.timelines[0].panels[1].canvas.focus()")
    browser.press("0", 48)
    assert window_of(browser) == (0, span, span)
    browser.press("+", 187)
    assert window_of(browser)[1] - window_of(browser)[0] == pytest.approx(span / 2)
    left = window_of(browser)[0]
    browser.press("ArrowRight", 39, modifiers=SHIFT)
    assert window_of(browser)[0] == pytest.approx(left + span / 8)
    browser.press("0", 48)
    browser.press("ArrowRight", 39)
    first = tip(browser)
    browser.press("ArrowDown", 40)
    second = tip(browser)
    assert "device 0" in first and "device 1" in second
    assert browser.run("document.querySelector('.aloud').textContent") == second  # said to screen readers


@pytest.mark.parametrize("dark", [False, True])
def test_blocks_have_the_colours_of_the_legend_in_both_modes(
    browser: Browser, pages: dict[str, Path], run4: RunRecord, dark: bool
) -> None:
    assert run4.plan is not None and run4.graph is not None
    browser.open(pages["run"], 1440, dark=not dark)
    browser.run("localStorage.clear()")
    browser.run("document.querySelector('[data-theme-button]').click()")  # the other mode than the system's
    for device in (0, 2, 8):
        stage = run4.plan.stages[run4.plan.stage_of_device[device]]
        own = tone(branch_of(stage, run4.graph, run4.branches))
        block = place_of(browser, 0, device, 0)
        assert block["kind"] == "F"
        expected = value(own.soft, "dark" if dark else "light")
        assert pixel(browser, device, 0) == expected and expected in legend_colours(browser, "forward")
    browser.run("localStorage.clear()")


def test_tables_are_sorted_by_click_and_by_key(browser: Browser, pages: dict[str, Path], run4: RunRecord) -> None:
    browser.open(pages["run"], 1440)
    before = column(browser, "peak memory")
    browser.run("""[...document.querySelectorAll("tr[data-stage]")][0].closest("table").querySelectorAll(".sort")[7].focus()""")
    browser.press("Enter", 13)
    ascending = column(browser, "peak memory")
    assert ascending == sorted(before, key=lambda cell: float(cell.split()[0])) != before
    assert browser.run("document.activeElement.parentElement.getAttribute('aria-sort')") == "ascending"
    browser.run("document.activeElement.click()")
    assert column(browser, "peak memory")[0] == ascending[-1]
    stages = column(browser, "stage")
    assert sorted(stages) == sorted(f"s{n}" for n in range(len(stages))) and stages != sorted(stages)


def test_an_operator_is_found_in_its_stage(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 1440)
    browser.run(
        """(input => { input.value = "2.layers.3"; input.dispatchEvent(new Event("input")); })(document.querySelector("input"))"""
    )
    assert lit(browser)["boxes"] == [5]
    assert browser.run("document.querySelector('.find output').textContent") == "s5: branches.2.layers.3"
