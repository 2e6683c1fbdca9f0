"""Look at every kind of report in a browser, at three widths, light and dark: `python -m tests.checks.report FOLDER`.

Pages of synthetic runs and of `run.py`'s own commands are opened in headless Chromium. Nothing may be asked for but the
page, no words may overlap, be too small or leave the page; FOLDER gets the pages and a screenshot of each. It takes some
minutes. `tests/report/test_browser.py` is the small sample of it in the suite.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpp.report.run.page import run_report
from tests.support.browser import Browser, executable
from tests.support.cli import ROOT
from tests.support.fake_runs import make_run
from tests.support.page_deeds import WIDTHS, faults

PROBLEM = ("model=mmt", "cluster=summit_2x4", "minibatch_size=64", "microbatch_size=8")
COMMANDS = {
    "comparison": (*PROBLEM, "mode=compare"),
    "continuous": (*PROBLEM, "mode=plan", "strategy=pipedream"),
    "split_backward": (*PROBLEM, "mode=plan", "strategy=zero_bubble"),
    "memory": (
        *("model=gpt_small", "mode=plan", "strategy=even", "strategy/memory=auto", "cluster.num_devices=2"),
        *("cluster.memory_bytes=1e7", "microbatch_size=16"),
    ),
    "inference": ("mode=inference", "model=clip_small", "cluster.num_devices=2", "engine=emulate"),
    "32_devices_512_microbatches": ("model=mmt", "cluster=summit_8x4", "mode=plan", "minibatch_size=512", "microbatch_size=1"),
    "infeasible": ("model=gpt_small", "mode=plan", "cluster.num_devices=2", "cluster.memory_bytes=1e4"),
}
SWEEP = (*PROBLEM[:2], "mode=plan", "strategy=graphpipe,sequential,piper", "minibatch_size=64,128")


def pages(folder: Path) -> Iterator[Path]:
    """Write all pages, and name them one by one."""
    for branches, settings in ((4, {}), (7, {}), (8, {"per_branch": 4}), (12, {"per_branch": 1})):
        run = make_run(branches, **settings)  # type: ignore[arg-type]
        assert run.plan is not None
        path = folder / f"run_{len(run.plan.stages)}_stages.html"
        path.write_text(run_report(run), encoding="utf-8")
        yield path
    for name, words in COMMANDS.items():
        yield _of_command(folder, name, (*words, f"hydra.run.dir={folder / name}"))
    yield _of_command(folder, "sweep", ("-m", *SWEEP, f"hydra.sweep.dir={folder / 'sweep'}"))


def _of_command(folder: Path, name: str, words: tuple[str, ...]) -> Path:
    subprocess.run([sys.executable, "run.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=name != "infeasible")
    return folder / name / "report.html"


def main() -> None:
    """Print what is wrong with each page; exit 1 if anything is."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if executable() is None:
        sys.exit("there is no Chromium on this machine")
    folder, wrong = Path(sys.argv[1]).resolve(), 0
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages(folder):
        name = page.stem if page.parent == folder else page.parent.name
        with Browser() as browser:
            for width in WIDTHS:
                for dark in (False, True):
                    found = faults(browser, page, width, dark)
                    wrong += len(found)
                    browser.screenshot(folder / f"{name}_{width}_{'dark' if dark else 'light'}.png")
                    print(f"{name}, {width} px, {'dark' if dark else 'light'}: {len(found)} faults", *found[:9], sep="\n    ")
            asked = set(browser.requests) - {page.as_uri()}
            wrong += len(asked)
            print(f"{name}: {page.stat().st_size:,} bytes", *(f"    asks for {address}" for address in asked), sep="\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
