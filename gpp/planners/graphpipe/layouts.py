"""Layouts made for devices that hold several stages, from which their search starts.

* `branches`: every block of parallel branches is dealt out over the devices, heaviest first, each device's share one stage; what
  lies before, between and after the blocks is a stage of its own on the device that has least to do, or on all devices.
* `divided`: the devices are divided among branches by what these have to do, and again among the branches within each; what
  lies before, between and after branches has all devices that there are to divide.
* `rounds`: a line of operators cut into a few chunks for each device, all equally long; the devices have them in turn (Megatron's
  interleaved schedule), or there and back (zero bubble's V).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpp.graph.op_graph import bits, mask_of
from gpp.graph.series_parallel import Order
from gpp.planners.common.stage_costs import StageCosts

Piece = tuple[int, tuple[int, ...]]
"""Operators, and the devices of the stage that they are."""

State = tuple[tuple[int, ...], tuple[int, ...]]
"""A plan as a walk has it (`gpp.planners.search.climb`): the stage of each operator, and the devices of each stage as bits."""

CHUNKS = (2, 3)
"""Chunks of a line on each device."""


def layouts(costs: StageCosts, orders: Sequence[Order], lines: Sequence[tuple[int, ...]], b: int) -> Iterator[State]:
    """Layouts of one micro-batch size from which every search begins; `divided` is for models of few operators alone."""
    everywhere = tuple(range(costs.cluster.num_devices))
    for order in orders:
        yield branches(costs, order, b, None)
        if len(everywhere) in costs.replicas[b]:
            yield branches(costs, order, b, everywhere)
    for line in lines:
        yield from rounds(costs, line, b)


def branches(costs: StageCosts, order: Order, b: int, devices: tuple[int, ...] | None) -> State:
    """Branches side by side; see the module's docstring.

    Args:
        devices: of the stages that lie before, between and after the blocks; None for the device that has least to do.
    """
    loads = [0.0] * costs.cluster.num_devices
    stages: list[Piece] = []
    between = 0

    def settle(mask: int) -> None:
        own = devices or (min(range(len(loads)), key=lambda d: (loads[d], d)),)
        for device in own:
            loads[device] += costs.compute_s(mask, b // len(own))
        stages.append((mask, own))

    for item in order.series_items(costs.graph.all_mask):
        parts = order.components(item)
        if len(parts) < 2:
            between |= item
            continue
        if between:
            settle(between)
            between = 0
        shares = dict.fromkeys(range(len(loads)), 0)
        for part in sorted(parts, key=lambda part: (-costs.compute_s(part, b), part)):
            device = min(shares, key=lambda d: (loads[d], d))
            loads[device] += costs.compute_s(part, b)
            shares[device] |= part
        stages += [(mask, (device,)) for device, mask in shares.items() if mask]
    if between:
        settle(between)
    return state_of(stages, costs.graph.num_ops)


def divided(costs: StageCosts, order: Order, b: int) -> State:
    """Devices divided among branches; see the module's docstring."""
    counts = costs.replicas[b]
    stages: list[Piece] = []

    def deal(mask: int, own: tuple[int, ...]) -> None:
        between = 0
        for item in order.series_items(mask):
            parts = order.components(item)
            given = _divided([costs.compute_s(part, b) for part in parts], counts, len(own)) if len(parts) > 1 else None
            if given is None:
                between |= item
                continue
            if between:
                stages.append((between, own))
                between = 0
            first = 0
            for part, count in zip(parts, given, strict=True):
                deal(part, own[first : first + count])
                first += count
        if between:
            stages.append((between, own))

    deal(costs.graph.all_mask, tuple(range(max(count for count in counts if count <= costs.cluster.num_devices))))
    return state_of(stages, costs.graph.num_ops)


def _divided(seconds: Sequence[float], counts: Sequence[int], devices: int) -> list[int] | None:
    """Devices of each branch, more for those that take longest, as long as there are some; None if the branches are more."""
    if len(seconds) > devices:
        return None
    out = [1] * len(seconds)
    more = {count: min((other for other in counts if other > count), default=2 * devices) for count in counts}
    while may := [i for i, count in enumerate(out) if more[count] - count <= devices - sum(out)]:
        slowest = max(may, key=lambda i: seconds[i] / out[i])
        out[slowest] = more[out[slowest]]
    return out


def rounds(costs: StageCosts, line: tuple[int, ...], b: int) -> Iterator[State]:
    """Chunks of a line; see the module's docstring."""
    count = costs.cluster.num_devices
    seconds = [costs.compute_s(1 << op, b) for op in line]
    for chunks in CHUNKS:
        cut = _equal(line, seconds, chunks * count)
        if len(cut) < count + 1:
            continue
        for there_and_back in (False, True):
            stages: list[Piece] = []
            for i, mask in enumerate(cut):
                lap, place = divmod(i, count)
                stages.append((mask, (count - 1 - place if there_and_back and lap % 2 else place,)))
            yield state_of(stages, costs.graph.num_ops)


def _equal(line: Sequence[int], seconds: Sequence[float], pieces: int) -> list[int]:
    """Masks of at most so many intervals of the line, about equally long."""
    out, done, total = [0], 0.0, sum(seconds)
    for op, took in zip(line, seconds, strict=True):
        # An operator goes where its middle lies.
        if out[-1] and (done + took / 2) * pieces > total * len(out) and len(out) < pieces:
            out.append(0)
        out[-1] |= 1 << op
        done += took
    return out


def state_of(stages: Sequence[Piece], num_ops: int) -> State:
    """The plan of these stages.

    >>> state_of([(0b01, (0,)), (0b10, (0, 1))], num_ops=2)
    ((0, 1), (1, 3))
    """
    stage_of = [0] * num_ops
    for s, (mask, _) in enumerate(stages):
        for op in bits(mask):
            stage_of[op] = s
    return tuple(stage_of), tuple(mask_of(own) for _, own in stages)
