"""Actions of stages that have operators on the host.

s2.O0@d1                 copy of what micro-batch 0 keeps on the host: there, after its forward
s2.P0@d1                 and back, before its backward
"""

from __future__ import annotations

from typing import Final

from gpp.program.kind import Kind, Need, Resource, Role

COPY_OUT: Final = "O"
COPY_IN: Final = "P"

KINDS: Final = (
    Kind(
        text=COPY_OUT,
        meaning="copy to the host",
        role=Role.COPY,
        copies=Resource.COPY_OUT,
        needs=(Need("F"),),
        needed_by=(Need("F", previous=True),),
    ),
    Kind(
        text=COPY_IN,
        meaning="fetch from the host",
        role=Role.COPY,
        copies=Resource.COPY_IN,
        needs=(Need(COPY_OUT),),
        needed_by=(Need("B"),),
    ),
)
