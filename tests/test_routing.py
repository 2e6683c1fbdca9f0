from collections import defaultdict

from hypothesis import given

from gpp.routing import Message, Piece, messages, pieces
from tests.support.generated import Side, pairs, sides


@given(sides())
def test_pieces_cover_the_samples_once_and_in_order(side: Side):
    found = side.pieces
    assert [sample for p in found for sample in range(p.lo, p.hi)] == list(range(side.total))
    for piece in found:
        assert piece.lo // side.size == piece.microbatch == (piece.hi - 1) // side.size
    for m in range(-(-side.total // side.size)):
        shares = {p.device: p.hi - p.lo for p in found if p.microbatch == m}
        takers = side.devices[m % side.stride :: side.stride]
        assert {*shares} <= {*takers}
        lengths = [shares.get(device, 0) for device in takers]
        assert max(lengths) - min(lengths) <= 1  # replicas share evenly


@given(pairs())
def test_messages_carry_every_sample_once(pair: tuple[Side, Side]):
    found = messages(pair[0].pieces, pair[1].pieces)
    assert [sample for m in found for sample in range(m.lo, m.hi)] == list(range(pair[0].total))
    sources, sinks = ({(p.device, p.microbatch): p for p in side.pieces} for side in pair)
    for m in found:
        a, b = sources[m.src_device, m.src_microbatch], sinks[m.dst_device, m.dst_microbatch]
        assert (m.lo, m.hi) == (max(a.lo, b.lo), min(a.hi, b.hi))


@given(pairs())
def test_messages_between_two_devices_stay_in_order(pair: tuple[Side, Side]):
    """Both ends walk their micro-batches in order, so one channel for each pair is first in, first out."""
    channels = defaultdict(list)
    for m in messages(pair[0].pieces, pair[1].pieces):
        channels[m.src_device, m.dst_device].append((m.src_microbatch, m.dst_microbatch, m.lo))
    for sent in channels.values():
        assert sent == sorted(sent)
        assert [s for s, _, _ in sent] == sorted(s for s, _, _ in sent)
        assert [d for _, d, _ in sent] == sorted(d for _, d, _ in sent)


@given(pairs())
def test_backwards_is_forwards_turned_round(pair: tuple[Side, Side]):
    src, dst = pair[0].pieces, pair[1].pieces
    back = [Message(m.dst_device, m.dst_microbatch, m.src_device, m.src_microbatch, m.lo, m.hi) for m in messages(src, dst)]
    assert back == messages(dst, src)


def test_a_replica_without_samples_has_no_piece():
    assert pieces((5, 6, 7), 2, 2) == [Piece(6, 0, 0, 1), Piece(7, 0, 1, 2)]
