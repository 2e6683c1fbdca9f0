"""A worker knows whether the processes that it belongs to are alive, also if they died before its first instant."""

import os
import subprocess
import sys
import time
from pathlib import Path

from gpp.runtime.worker import parent
from gpp.runtime.worker.parent import PARENT, identity

ROOT = Path(__file__).resolve().parents[2]
ALONE = f"import runpy; own = runpy.run_path({parent.__file__!r})"
"""The module without its package, whose import takes a second."""

CHILD = f"{ALONE}; own['end_with_parent'](); print('alive')"
SAY = f"{ALONE}; print(own['identity'](), flush=True)"


def said_by_child(*launcher: str, **env: str) -> str:
    """What a child prints that belongs to this process, or to a `launcher` between the two."""
    child = [sys.executable, "-c", CHILD]
    words = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r})", *launcher] if launcher else child
    clean = {name: value for name, value in os.environ.items() if name not in (PARENT, "TORCHELASTIC_RUN_ID")}
    done = subprocess.run(words, env={**clean, **env}, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.strip()


def test_the_identities_that_are_handed_down_are_compared() -> None:
    mine = identity()
    pid, started, boot, space = mine.split("/")
    assert int(pid) == os.getpid() and int(started) > 0 and boot and space
    assert said_by_child() == said_by_child(**{PARENT: mine}) == "alive"
    # Another process has got the id of the parent.
    assert said_by_child(**{PARENT: f"{pid}/{int(started) + 1}/{boot}/{space}"}) == ""
    # One of several has ended: its own child is left.
    ended = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True).stdout.strip()
    assert ended.endswith(f"/{boot}/{space}")
    assert said_by_child(**{PARENT: f"{mine} {ended}"}) == ""
    # Nobody can ask another machine, or another container.
    assert said_by_child(**{PARENT: f"1/1/{boot}/pid:[1]"}) == "alive"


def test_a_process_whose_end_nobody_has_noticed_yet_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", SAY], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    zombie = child.stdout.readline().strip()
    until = time.monotonic() + 30
    while " Z " not in Path(f"/proc/{child.pid}/stat").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    assert said_by_child(**{PARENT: zombie}) == ""
    child.communicate()


def test_torchrun_is_known_by_its_command_line() -> None:
    run = {"TORCHELASTIC_RUN_ID": "none"}
    assert said_by_child("-m", "gpp.runtime.worker", "/somewhere", **run) == "alive"
    assert said_by_child(**run) == ""  # this process is a stranger to it


def test_a_worker_whose_parent_dies_at_once_imports_nothing(tmp_path: Path) -> None:
    """One that goes on says that there is no job."""
    worker = f"subprocess.Popen([{sys.executable!r}, '-m', 'gpp.runtime.worker', {str(tmp_path)!r}], env=env)"
    hands_down = f"env = {{**os.environ, {PARENT!r}: own['identity']()}}"
    code = f"{ALONE}; import os, subprocess; {hands_down}; {worker}; os.kill(os.getpid(), 9)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    # The pipe is open as long as the worker lives.
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9 and not done.stderr
