"""`python -m gpp.ui FOLDER`, which is `gpp ui FOLDER`."""

import sys

from gpp.ui.command import main

sys.exit(main(sys.argv[1:]))
