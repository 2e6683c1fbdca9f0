"""Replicas that take whole micro-batches in turn instead of splitting every one (PipeDream's 1F1B-RR).

A replica computes R times as much in each of R times fewer passes, so what a pass costs by itself (launching kernels, messages)
is paid R times less often. In exchange it keeps whole micro-batches, and there must be R of them between two updates.
"""
