"""The page in a browser, with the real server behind it: what is dragged and pressed is planned and shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.browser import Browser, executable

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


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    server = subprocess.Popen([sys.executable, "-m", "gpp.ui", str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().split()[-1]
    server.terminate()
    assert server.wait(timeout=60) in (0, -15)
    server.stdout.close()


def test_settings_moves_and_exports_follow_the_reader(address: str) -> None:
    with Browser() as browser:
        browser.visit(address)
        browser.visit(f"http://{urlsplit(address).netloc}/run?run=towers/graphpipe")
        hurried, where, moved, drawn, exported, undone = browser.run(DEEDS)
        assert hurried.startswith("With 2 devices in place of") and where.startswith("#devices=2&microbatch=auto&memory=1&")
        assert " in stage " in moved and drawn == 1 and undone
        assert "export=torchtitan" in exported
        hosts = {urlsplit(each).netloc for each in browser.requests if not each.startswith("about:")}
        assert hosts == {urlsplit(address).netloc}
