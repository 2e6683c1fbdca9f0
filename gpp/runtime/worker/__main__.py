"""`python -m gpp.runtime.worker RUN_DIR [MODULE]`: one worker, under RANK and WORLD_SIZE.

MODULE has a function `main(run_dir)`: the project's own worker, unless an engine names another.
"""

import sys
from importlib import import_module
from pathlib import Path

from gpp.runtime.worker.parent import end_with_parent

# Before torch is imported: that takes seconds, in which a parent may die.
end_with_parent()
_, run_dir, *module = sys.argv
import_module(*module or ["gpp.runtime.worker.main"]).main(Path(run_dir))
