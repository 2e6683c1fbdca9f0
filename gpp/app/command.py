"""The `gpp` command: `run.py` from any folder, with the configurations of the installed package.

gpp run model=mmt_small            as python run.py model=mmt_small
gpp plan model=mmt_small           as python run.py mode=plan model=mmt_small; so for every mode
gpp ui outputs                     a page to keep open beside the runs of a folder (`gpp.ui`)
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from gpp.app.interrupted import leave_at_once


def as_mode(words: list[str]) -> list[str]:
    """The words of a command line whose first one may be a mode, or `run` for training, as `run.py` reads them.

    Raises:
        SystemExit: the first word is a word of its own, and none of these.
    """
    from gpp.app.vocabulary import MODES

    if not words or words[0].startswith("-") or "=" in words[0]:
        return words
    modes = {"run": "train", **{mode: mode for mode in MODES}}
    if words[0] not in modes:
        print(
            f"error: gpp {words[0]}: no such command; choose {', '.join(modes)}, ui, or write settings as KEY=VALUE",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return [f"mode={modes[words[0]]}", *words[1:]]


def main(conf: str | Path | None = None, name: str = "config") -> None:
    """Run `run.py` with this process's words.

    Args:
        conf: a folder of configurations beside the package's own, for the `run.py` of a repository of one's own.
        name: the configuration in it to begin with.
    """
    leave_at_once()
    from gpp.app.vocabulary import ROOT

    page = sys.argv[1:2] == ["ui"]
    sys.argv[1:] = sys.argv[1:] if page else as_mode(sys.argv[1:])
    # Models and data of the user's are found where the command is typed; workers inherit it.
    sys.path[:0] = [os.getcwd()]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    if page:
        del sys.argv[1]
        runpy.run_module("gpp.ui", run_name="__main__")
        return
    if conf is not None and not {"-cd", "--config-dir", "mode=new"} & set(sys.argv[1:]):
        sys.argv[1:1] = ["-cd", str(conf), "-cn", name]
    runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
