"""The sends that a device may have under way at a time, with which a program still runs to its end.

A message lies in memory until its receiver has posted the receive, so whoever sends far ahead waits for the oldest one. Where a
device runs several stages, all of one may stand before the first pass of another, for which a receiver waits: a device that waited
too early would never come to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from gpp.program.channels import Channel
from gpp.program.kinds import RECEIVES, SENDS, Action
from gpp.program.program import channel_of
from gpp.program.waits import Waits

Limits = Mapping[int, int | None]
"""Device -> the most sends under way before another one begins; None for no limit."""


def enough_sends(waits: Waits, limits: Limits) -> Limits:
    """The limits, doubled until the program runs to its end under all of them: the same on every device that asks.

    >>> dict(enough_sends(program.waits, {0: 16, 1: None}))
    {0: 16, 1: None}
    """
    while not _BoundedSends(waits, limits).ends():
        limits = {device: limit and 2 * limit for device, limit in limits.items()}
    return limits


class _BoundedSends:
    """One run of a program whose sends are bounded. Sends between stages of one device are none: they are handed over in memory."""

    def __init__(self, waits: Waits, limits: Limits) -> None:
        self._waits, self._limits = waits, limits
        self._at = dict.fromkeys(waits.devices, 0)
        self._sent, self._posted = Counter[Channel](), Counter[Channel]()
        self._under_way = {device: deque[tuple[Channel, int]]() for device in waits.devices}

    def ends(self) -> bool:
        """Whether every device comes to its end."""
        devices, moved = self._waits.devices, True
        while moved:
            moved = sum(self._advanced(device) for device in devices) > 0  # all of them, whoever has moved before
        return all(self._at[device] == len(self._waits.actions[device]) for device in devices)

    def _advanced(self, device: int) -> bool:
        """Run a device as far as it goes; whether it has moved."""
        actions, start = self._waits.actions[device], self._at[device]
        while self._at[device] < len(actions) and self._goes(device, actions[self._at[device]]):
            meeting = self._waits.meetings.get(self._node(device), (self._node(device),))
            for member, _ in map(self._waits.place, meeting):
                self._at[member] += 1
        return self._at[device] > start

    def _node(self, device: int) -> int:
        return self._waits.first[device] + self._at[device]

    def _goes(self, device: int, action: Action) -> bool:
        """Whether a device's next action can run; notes what it sends and posts."""
        if action.kind in SENDS:
            return action.peer_device == device or self._sends(device, channel_of(action, device))
        if action.kind in RECEIVES:
            self._posted[channel_of(action, device)] += 1
            return True
        node = self._node(device)
        if (meeting := self._waits.meetings.get(node)) is not None:
            return all(self._at[member] == place for member, place in map(self._waits.place, meeting))
        return all(self._at[sender] > place for sender, place in map(self._waits.place, self._waits.needs.get(node, ())))

    def _sends(self, device: int, channel: Channel) -> bool:
        under_way, limit = self._under_way[device], self._limits.get(device)
        while under_way and self._posted[under_way[0][0]] > under_way[0][1]:
            under_way.popleft()
        if limit is not None and len(under_way) > limit:
            return False
        under_way.append((channel, self._sent[channel]))
        self._sent[channel] += 1
        return True
