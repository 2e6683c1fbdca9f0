"""The `gpp` command: `run.py` from any folder, with the configurations of the installed package."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from gpp.app.interrupted import leave_at_once


def main(conf: str | Path | None = None, name: str = "config") -> None:
    """Run `run.py` with this process's words.

    Args:
        conf: a folder of configurations beside the package's own, for the `run.py` of a repository of one's own.
        name: the configuration in it to begin with.
    """
    leave_at_once()
    from gpp.app.vocabulary import ROOT

    # Models and data of the user's are found where the command is typed; workers inherit it.
    sys.path[:0] = [os.getcwd()]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    if conf is not None and not {"-cd", "--config-dir", "mode=new"} & set(sys.argv[1:]):
        sys.argv[1:1] = ["-cd", str(conf), "-cn", name]
    runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
