"""Every command and every Python block of README.md and docs/: answered, or run to its end.

    python -m tests.checks.docs                  all commands composed, checked and for a small model planned; all Python blocks
    python -m tests.checks.docs --run strategies each command of this page as a process, to its end, with its time; some take hours

The suite does less, so that it takes seconds (tests/docs/test_blocks.py). Commands that need cards or other machines are composed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import run
from tests.support.documented import prepare, python_blocks
from tests.support.documented_answers import COMMANDS, COMPOSED, ELSEWHERE, complaint
from tests.support.documented_python import write_script
from tests.support.one_process import answered
from tests.support.pages import ROOT

LIMIT_S = 3600.0


def main() -> int:
    """The exit code is 1 where a command or a block fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="PAGE", help="run the commands of a page, as in strategies")
    page = parser.parse_args().run
    with tempfile.TemporaryDirectory() as name:
        folder, failed = Path(name), 0
        prepare(folder)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
        if page is not None:
            return _run(page, folder, env)
        sys.path.insert(0, name)
        script = write_script(folder, [block for block in python_blocks() if not block.where.startswith("README")], loads=True)
        subprocess.run([sys.executable, script], cwd=folder, env=env, check=True)
        for where, error in json.loads((folder / "blocks.json").read_text()).items():
            failed += bool(error)
            print(f"{'failed' if error else 'ok':6}  {where}  {error}")
        words = ["logger=none", "cost=analytical", "engine=reference", "steps=2", "checkpoint.every=1", "evaluate_every=0"]
        with pytest.MonkeyPatch.context() as patch:
            answered([*words, "baselines_s=0"], run.story, patch, folder)  # outputs/latest
        for command in COMMANDS:
            with pytest.MonkeyPatch.context() as patch:
                said = complaint(command, folder, patch)
            failed += bool(said)
            print(f"{'failed' if said else 'ok':6}  {command.where}  {command.text}\n{said}".rstrip(), flush=True)
    return int(failed > 0)


def _run(page: str, folder: Path, env: dict[str, str]) -> int:
    failed = 0
    for command in COMMANDS:
        alone = COMPOSED.search(command.text) and " -cn " not in command.text and " -m " not in command.text
        if not command.where.startswith(f"{page}.md") or alone or ELSEWHERE.search(command.text):
            continue
        began = time.monotonic()
        script = [sys.executable, str(ROOT / "run.py"), *command.words]
        ended = subprocess.run(
            script, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S
        )
        failed += ended.returncode != 0
        print(f"{time.monotonic() - began:6.0f} s  exit code {ended.returncode}  {shlex.join(command.words)}", flush=True)
        if ended.returncode:
            print(ended.stdout[-2000:])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
