"""What planners do most often, in compiled code (`gpp.compiled`); a walk over plans whose devices may hold several stages."""

import gpp.compiled  # noqa: F401  # from now on its files are found where they are compiled
