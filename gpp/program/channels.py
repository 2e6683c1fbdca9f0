"""Channels: both ends of each, and the proof that they agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import final

from gpp.errors import MalformedProgram
from gpp.program.kinds import KINDS, RECEIVES, SENDS, Action, Direction

Channel = tuple[Direction, int, int, int, int]
"""Direction, source stage, destination stage, source device, destination device."""

Messages = Mapping[Channel, Sequence[tuple[int, int]]]
"""The samples of the messages of every channel, in order."""


@final
class Ends:
    """Both ends of a channel: the nodes that send, and the samples of every message at either end."""

    __slots__ = ("received", "resource", "sends", "sent", "waiting")

    def __init__(self, resource: int) -> None:
        self.resource = resource
        self.sends: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self.received: list[tuple[int, int]] = []
        self.waiting: int | None = None  # the resource of the device that waits for the channel's next message


def both_ends(actions: Mapping[int, Sequence[Action]]) -> tuple[Messages, Messages]:
    """The messages at both ends of every channel, as the devices' lists have them."""
    sent: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    received: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for device in sorted(actions):
        for kind, stage, _, peer_stage, peer_device, lo, hi in actions[device]:
            if kind in SENDS:
                sent[KINDS[kind].direction, stage, peer_stage, device, peer_device].append((lo, hi))
            elif kind in RECEIVES:
                received[KINDS[kind].direction, peer_stage, stage, peer_device, device].append((lo, hi))
    return sent, received


def check_channels(sent: Messages, received: Messages) -> None:
    """Refuse channels whose two ends list different messages, or the same in another order.

    Raises:
        MalformedProgram: names the channel and the first difference.
    """
    for channel in sorted(sent.keys() | received.keys(), key=str):
        sends, receives = sent.get(channel, []), received.get(channel, [])
        if sends != receives:
            direction, src, dst, src_device, dst_device = channel
            bad = next(
                ((a, b) for a, b in zip(sends, receives, strict=False) if a != b),
                (sends[len(receives) :][:1], receives[len(sends) :][:1]),
            )
            raise MalformedProgram(
                f"channel {direction} s{src}.d{src_device} > s{dst}.d{dst_device}: sender and receiver disagree, "
                f"{len(sends)} sends against {len(receives)} receives, first difference {bad[0]} against {bad[1]}"
            )
