"""The graph of operators that planners see; what adds up sets of them is compiled (`gpp.compiled`)."""

import gpp.compiled  # noqa: F401  # from now on its files are found where they are compiled
