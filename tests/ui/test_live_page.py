"""The page in a browser, with the real server behind it: what is dragged and pressed is planned and shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.browser import FRAMES, Browser, executable

pytestmark = [
    pytest.mark.skipif(executable() is None, reason="no Chromium on this machine: pages are tested in a browser"),
    pytest.mark.long,
]

DEEDS = """(async () => {
  const page = await gpp.planned, found = [];
  const until = async (holds) => { while (!holds()) await new Promise((done) => setTimeout(done, 10)); };
  const said = () => document.getElementById("changed").textContent;
  const devices = document.querySelector("[name=devices]");
  const set = (value) => { devices.value = value; devices.dispatchEvent(new Event("input", { bubbles: true })); };
  for (const value of [0, 2, 1]) set(value); // in a hurry: the last one counts
  await until(() => page.now.state[0] === 1);
  found.push(said(), location.hash);
  set(3);
  await until(() => page.now.state[0] === 3 && !page.now.entry.more);
  const before = page.now.entry.step_s;
  document.querySelector("#moves button").click();
  await until(() => page.now.edited);
  found.push(said(), document.getElementById("drawing").children.length);
  document.getElementById("back").click();
  await until(() => page.now.entry.step_s === before);
  document.querySelector("[data-export=torchtitan]").click();
  await until(() => document.querySelector("#exported pre"));
  return [...found, document.getElementById("exported").textContent, document.getElementById("back").disabled];
})()"""


MIDDLE = """(stage => {
  const box = document.querySelector(`#drawing [data-stage="${stage}"]`).getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})(%d)"""
ANSWERED = """(async () => {
  const page = await gpp.planned;
  await new Promise((done) => setTimeout(done, 50));
  while (page.now.entry.more || document.querySelector("#controls[aria-busy]")) await new Promise((done) => setTimeout(done, 10));
  const { entry } = page.now, said = (id) => document.getElementById(id).textContent;
  const undone = document.getElementById("back").disabled;
  const { step_s, operators, moves } = entry;
  return { step_s, operators, moves, changed: said("changed"), refused: said("refused"), undone };
})()"""


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "-m", "gpp.ui", str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().split()[-1]
    server.terminate()
    assert server.wait(timeout=60) in (0, -15)
    server.stdout.close()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    with Browser() as found:
        found.call("Emulation.setDeviceMetricsOverride", width=1440, height=1000, deviceScaleFactor=1, mobile=False)
        found.visit(address)
        yield found


@pytest.fixture
def page(browser: Browser, address: str) -> Browser:
    browser.visit("about:blank")
    browser.visit(f"http://{urlsplit(address).netloc}/run?run=towers/graphpipe")
    return browser


def test_settings_moves_and_exports_follow_the_reader(page: Browser, address: str) -> None:
    hurried, where, moved, drawn, exported, undone = page.run(DEEDS)
    assert hurried.startswith("With 2 devices in place of") and where.startswith("#devices=2&microbatch=auto&memory=1&")
    assert " in stage " in moved and drawn == 1 and undone
    assert "export=torchtitan" in exported
    hosts = {urlsplit(each).netloc for each in page.requests if not each.startswith("about:")}
    assert hosts == {urlsplit(address).netloc}


def test_a_stage_that_is_dragged_moves_the_prediction_and_comes_back(page: Browser) -> None:
    start = page.run(ANSWERED)
    _, source, to, _ = next(move for move in start["moves"])

    def drag() -> dict[str, Any]:
        """From the one stage to the other, wherever what is told above the picture has put them."""
        page.run("document.getElementById('drawing').scrollIntoView({ block: 'center' })")
        (x, y), (to_x, to_y) = page.run(MIDDLE % source), page.run(MIDDLE % to)
        page.point(x, y)
        page.point(x, y, "mousePressed", button="left", buttons=1, clickCount=1)
        page.run(FRAMES)
        for part in (0.3, 0.7, 1.0):
            page.point(x + part * (to_x - x), y + part * (to_y - y), button="left", buttons=1)
        return page.run(ANSWERED)

    def drop() -> dict[str, Any]:
        page.point(*page.run(MIDDLE % to), "mouseReleased", button="left", clickCount=1)
        return page.run(ANSWERED)

    held = drag()
    went = start["operators"][source] - held["operators"][source]
    assert went == held["operators"][to] - start["operators"][to] == start["operators"][source] - 1
    assert held["step_s"] != start["step_s"] and f"in stage {to} in place of stage {source}" in held["changed"]
    page.press("Escape", 27)
    escaped = page.run(ANSWERED)
    assert (escaped["step_s"], escaped["operators"], escaped["undone"]) == (start["step_s"], start["operators"], True)
    drop()
    drag()
    kept = drop()
    assert kept["step_s"] == held["step_s"] and not kept["undone"]
    refused = drag()  # one operator is left there
    assert refused["refused"] == f"s{source} has one operator, and a stage must keep one." and refused["step_s"] == held["step_s"]
    drop()
    page.run("document.getElementById('back').click()")
    back = page.run(ANSWERED)
    assert (back["step_s"], back["operators"], back["undone"]) == (start["step_s"], start["operators"], True)
