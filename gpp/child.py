"""What a process that this program starts needs to find the modules that this program finds. This module is free of torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def same_modules() -> dict[str, str]:
    """Environment variables with which a child imports what this program does: the folder of its script is on the path.

    So the user's modules that a job names (an optimizer's, an operator's) are found from whatever folder the program was started.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [str(Path(script).resolve().parent)] if script else []
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}
