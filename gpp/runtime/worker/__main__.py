"""`python -m gpp.runtime.worker RUN_DIR`: one worker, under RANK and WORLD_SIZE."""

import sys
from pathlib import Path

from gpp.runtime.worker.process import guarded
from gpp.runtime.worker.worker import run

guarded(Path(sys.argv[1]), run)
