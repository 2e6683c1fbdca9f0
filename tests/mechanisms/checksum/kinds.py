from __future__ import annotations

from gpp.program.kind import Kind, Resource, Role

KINDS = (
    Kind(text="K", meaning="add up gradients", role=Role.COMPUTE, occupies=Resource.DEVICE, direction="K", of_minibatch=True),
    Kind(text="SK", meaning="send a checksum", role=Role.SEND, occupies=Resource.CHANNEL, direction="K", of_minibatch=True),
    Kind(text="RK", meaning="receive a checksum", role=Role.RECEIVE, occupies=Resource.NOTHING, direction="K", of_minibatch=True),
)
