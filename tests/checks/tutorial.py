"""The tutorial as processes of a shell, each block as it stands, and the seconds that it takes.

    python -m tests.checks.tutorial

The suite follows the same page in forks of one process (`tests/docs/test_tutorial.py`). Here each block is a program of its own, so
that a time is what a reader waits for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.pages import ROOT, TUTORIAL, blocks

LIMIT_S = 60.0
"""What the page promises for each step, on a machine with nothing else to do."""


def main() -> int:
    """Follow the page; the exit code is 1 where a block fails or takes longer than it may."""
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {**os.environ, "PATH": beside, "PYTHONPATH": str(ROOT), "GPP_CACHE": f"{folder}/cache"}
        for block in (block for page in TUTORIAL for block in blocks(page)):
            if block.file:
                Path(folder, block.file).write_text(block.text)
                continue
            if block.language != "sh":
                continue
            begin, before = time.monotonic(), os.times()
            shell = ["bash", "-ec", block.text]
            ended = subprocess.run(shell, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            taken, after = time.monotonic() - begin, os.times()
            # What others compute meanwhile makes a reader wait, and is not the page's.
            own = after.children_user - before.children_user + after.children_system - before.children_system
            print(f"{taken:6.1f} s  {block.text.strip().splitlines()[-1]}")
            if ended.returncode:
                print(ended.stdout)
                return 1
            code |= min(taken, own) > LIMIT_S
    return code


if __name__ == "__main__":
    sys.exit(main())
