from gpp.program.kind import Kind, Role

KINDS = (
    Kind(text="K", meaning="add up gradients", role=Role.COMPUTE, direction="K", of_minibatch=True),
    Kind(text="SK", meaning="send a checksum", role=Role.SEND, direction="K", of_minibatch=True),
    Kind(text="RK", meaning="receive a checksum", role=Role.RECEIVE, direction="K", of_minibatch=True),
)
