import random
from collections import defaultdict

import pytest

from gpp.routing import Message, Piece, messages, pieces


@pytest.mark.parametrize("seed", range(40))
def test_pieces_cover_the_samples_once_and_in_order(seed):
    rng = random.Random(seed)
    devices, size, total = rng.sample(range(20), rng.randint(1, 6)), rng.randint(1, 16), rng.randint(1, 60)
    found = pieces(devices, size, total)
    assert [sample for p in found for sample in range(p.lo, p.hi)] == list(range(total))
    for piece in found:
        assert piece.lo // size == piece.microbatch == (piece.hi - 1) // size
    for m in range(-(-total // size)):
        shares = [p.hi - p.lo for p in found if p.microbatch == m]
        lengths = shares + [0] * (len(devices) - len(shares))
        assert max(lengths) - min(lengths) <= 1  # replicas share evenly


@pytest.mark.parametrize("seed", range(80))
def test_messages_carry_every_sample_once(seed):
    rng = random.Random(seed)
    total = rng.randint(1, 60)
    sides = []
    for start in (0, 10):
        devices = list(range(start, start + rng.randint(1, 6)))
        sides.append(pieces(devices, rng.randint(1, 16), total))
    found = messages(*sides)
    assert [sample for m in found for sample in range(m.lo, m.hi)] == list(range(total))
    sources = {(p.device, p.microbatch): p for p in sides[0]}
    sinks = {(p.device, p.microbatch): p for p in sides[1]}
    for m in found:
        a, b = sources[m.src_device, m.src_microbatch], sinks[m.dst_device, m.dst_microbatch]
        assert (m.lo, m.hi) == (max(a.lo, b.lo), min(a.hi, b.hi))


@pytest.mark.parametrize("seed", range(40))
def test_messages_between_two_devices_stay_in_order(seed):
    """Both ends walk their micro-batches in order, so one channel for each pair is first in, first out."""
    rng = random.Random(seed)
    total = rng.randint(1, 60)
    found = messages(
        pieces(range(rng.randint(1, 5)), rng.randint(1, 12), total),
        pieces(range(10, 10 + rng.randint(1, 5)), rng.randint(1, 12), total),
    )
    channels = defaultdict(list)
    for m in found:
        channels[m.src_device, m.dst_device].append((m.src_microbatch, m.dst_microbatch, m.lo))
    for sent in channels.values():
        assert sent == sorted(sent)
        assert [s for s, _, _ in sent] == sorted(s for s, _, _ in sent)
        assert [d for _, d, _ in sent] == sorted(d for _, d, _ in sent)


def test_backwards_is_forwards_turned_round():
    src, dst = pieces((0, 1), 6, 12), pieces((2, 3, 4), 4, 12)
    back = [Message(m.dst_device, m.dst_microbatch, m.src_device, m.src_microbatch, m.lo, m.hi) for m in messages(src, dst)]
    assert back == messages(dst, src)


def test_equal_sizes_are_one_to_one():
    assert messages(pieces((0,), 4, 8), pieces((1,), 4, 8)) == [Message(0, 0, 1, 0, 0, 4), Message(0, 1, 1, 1, 4, 8)]


def test_a_replica_without_samples_has_no_piece():
    assert pieces((5, 6, 7), 2, 2) == [Piece(6, 0, 0, 1), Piece(7, 0, 1, 2)]


def test_the_last_microbatch_may_be_smaller():
    assert pieces((0,), 4, 6) == [Piece(0, 0, 0, 4), Piece(0, 1, 4, 6)]
