"""The best chain along a line of operators on so many devices, whatever the number of its stages: compiled (`gpp.compiled`)."""

from __future__ import annotations

from gpp.compiled import integers, reals

NEVER = float("inf")


def best_chain(begin, end, replicas, busy_s, through_s, depth, last: int, num_devices: int):
    """The estimate of the best chain, and the rows that are its stages, from the first to the last; infinity and none.

    The estimate of a stage and what follows is g = max(busy, through + g(what follows)). One chain is kept for each place and
    number of devices: where memory limits the depth, a slower chain of fewer stages, which would have fitted there, may be missed.

    Args:
        begin, end: places of each stage that may be, by ascending `begin`; of equally good ones the first row is taken.
        replicas: its devices.
        busy_s, through_s: its seconds in an iteration, and those of one micro-batch with the transfers behind it.
        depth: the longest chain from the stage on that fits.
        last: the place at the end of the line; the first one is 0.
    """
    width = num_devices + 1
    best_s, chosen, stages = reals((last + 1) * width), integers((last + 1) * width), integers((last + 1) * width)
    # Devices that the stages from a place on have at least.
    least = integers(last + 1)
    for i in range(last):
        least[i] = width
        for d in range(width):
            best_s[i * width + d] = NEVER
    for row in range(len(begin) - 1, -1, -1):
        at, behind = begin[row] * width, end[row] * width - replicas[row]
        busy, through, most = busy_s[row], through_s[row], depth[row]
        first = least[end[row]] + replicas[row]
        if first < least[begin[row]]:
            least[begin[row]] = first
        for d in range(first, width):
            took = through + best_s[behind + d]
            if took < busy:
                took = busy
            if took <= best_s[at + d] and stages[behind + d] < most:
                best_s[at + d], chosen[at + d], stages[at + d] = took, row, stages[behind + d] + 1
    rows = []
    d = num_devices
    at = 0
    while best_s[num_devices] < NEVER and at < last:
        row = chosen[at * width + d]
        rows.append(row)
        at, d = end[row], d - replicas[row]
    return best_s[num_devices], rows
