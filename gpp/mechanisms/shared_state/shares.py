"""The replica that keeps the optimizer's state of each parameter, where a stage's replicas share it (ZeRO's first stage).

Whole parameters are dealt out, the largest first, each to the replica that has least so far; torch's
`ZeroRedundancyOptimizer` deals them out alike. So a norm, an update and a checkpoint see the very tensors that they see
without sharing, and a parameter that is larger than all others together is the share of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping


def share_out(sizes: Mapping[str, float], count: int) -> dict[str, int]:
    """Name of a parameter -> number of its replica, in 0..count-1.

    Args:
        sizes: name -> bytes.
    """
    held, out = [0.0] * count, dict[str, int]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        out[name] = replica = min(range(count), key=held.__getitem__)
        held[replica] += sizes[name]
    return out


def largest_share(sizes: Mapping[str, float], count: int) -> float:
    """Part of all bytes that the replica with most of them keeps: 1 / count where they can be dealt out evenly."""
    total, held = sum(sizes.values()), [0.0] * count
    for name, replica in share_out(sizes, count).items():
        held[replica] += sizes[name]
    return max(held) / total if total else 1.0
