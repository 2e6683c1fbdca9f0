"""Times of programs and plans; the walk along the longest path is compiled (`gpp.compiled`)."""

import gpp.compiled  # noqa: F401  # from now on its files are found where they are compiled
