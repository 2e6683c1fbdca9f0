"""Seconds and bytes of operators and stages; what adds up the memory of a device is compiled (`gpp.compiled`)."""

import gpp.compiled  # noqa: F401  # from now on its files are found where they are compiled
