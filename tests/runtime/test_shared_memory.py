"""Messages through shared memory: order, room, sleep, silence."""

import os
import threading

import pytest
import torch

from gpp.runtime.transport import shared_memory
from gpp.runtime.transport.form import Form
from gpp.runtime.transport.shared_memory import ASLEEP, FREED, ORDER, PUBLISHED, SPARE, RingSize, SharedMemory, available

pytestmark = pytest.mark.skipif(not available(), reason="shared memory needs Linux on x86-64")

NUMBER = Form((1,), torch.int32)


def form_of(tensor: torch.Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype)


def ends(*sizes: RingSize, timeout_s: float = 20.0) -> tuple[SharedMemory, SharedMemory]:
    """A receiver and a sender that has mapped the receiver's memory by its process and descriptor, as another process would."""
    receiver, sender = SharedMemory(dict(enumerate(sizes)), timeout_s), SharedMemory({}, timeout_s)
    sender.connect(os.getpid(), receiver.descriptor, list(range(len(sizes))))
    return receiver, sender


def test_messages_arrive_in_order_whatever_their_shapes() -> None:
    receiver, sender = ends(RingSize(4096, 3), RingSize(64, 3))
    sent = [torch.randn(n, 8) for n in (4, 1, 7)]
    flags = torch.tensor([True, False, True])
    for tensor in sent:
        sender.outgoing[0].put(tensor)
    sender.outgoing[1].put(flags)
    posted = [receiver.post(0, form_of(tensor)) for tensor in sent]
    assert torch.equal(receiver.post(1, form_of(flags)).wait(), flags)
    for arrival, tensor in zip(posted, sent, strict=True):
        assert torch.equal(arrival.wait(), tensor)


def test_a_sender_never_blocks_and_what_found_no_room_follows() -> None:
    receiver, sender = ends(RingSize(4, 2))
    for i in range(7):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
    assert sender.waiting() == 5
    seen = []
    for _ in range(7):
        seen.append(int(receiver.post(0, NUMBER).wait()))
        sender.push()
    assert seen == list(range(7))
    assert sender.waiting() == 0


def test_messages_without_room_move_on_while_their_sender_waits_for_something_else() -> None:
    """Or two workers wait for each other: one in a sum for the other, which waits for a message that the first has yet to write."""
    receiver, sender = ends(RingSize(4, 2))
    for i in range(7):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
    seen, sums = list[int](), threading.Event()

    def receive() -> None:
        seen.extend(int(receiver.post(0, NUMBER).wait()) for _ in range(7))
        sums.set()

    reader = threading.Thread(target=receive, daemon=True)
    reader.start()
    sender.push_until(sums.is_set)
    reader.join(20.0)
    assert seen == list(range(7))


def test_hot_slots_are_used_again() -> None:
    receiver, sender = ends(RingSize(4, 8))
    for i in range(20):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
        assert int(receiver.post(0, NUMBER).wait()) == i
    words = receiver.incoming[0].words.values
    assert set(words[ORDER : ORDER + 8]) == {0, 1}  # a slot is free again when the message after it is taken
    assert (words[PUBLISHED], words[FREED]) == (20, 19)


def test_a_message_stays_where_it_lies_until_its_last_reader_goes() -> None:
    """The reader may be a tensor that a graph has saved: only the storage knows."""
    receiver, sender = ends(RingSize(4096, 8))
    sent = [torch.randn(4, 8) for _ in range(6)]
    for tensor in sent:
        sender.outgoing[0].put(tensor)
    ring, form = receiver.incoming[0], form_of(sent[0])
    weight = torch.randn(8, 2, requires_grad=True)
    # A graph keeps a view of each of the first three, the list the others.
    losses = [(receiver.post(0, form).wait().view(2, 2, 8)[1:] @ weight).sum() for _ in range(3)]
    again = [receiver.post(0, form).wait() for _ in range(3)]
    assert set(ring.lent) == {0, 1, 2, 3, 4, 5}
    for number in range(40):  # more messages than there are slots do not touch what is kept
        sender.outgoing[0].put(torch.full((4, 8), float(number)))
        assert receiver.post(0, form).wait().unique().tolist() == [number]
    for loss, tensor in zip(losses, sent, strict=False):
        (gradient,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(gradient, tensor.view(2, 2, 8)[1].sum(0)[:, None].expand(8, 2))
    assert all(map(torch.equal, again, sent[3:]))
    ring.collect()
    assert set(ring.lent) == {3, 4, 5}  # the graphs were used up by the gradients
    again.clear()
    ring.collect()
    assert not ring.lent
    assert not any(ring.words.values[ring.full + slot] for slot in range(8))


def test_messages_flow_however_many_are_kept() -> None:
    receiver, sender = ends(RingSize(4, 5))
    kept = []
    for i in range(30):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
        kept.append(receiver.post(0, NUMBER).wait())
    assert [int(one) for one in kept] == list(range(30))
    assert len(receiver.incoming[0].lent) == 5 - SPARE


def test_what_is_written_in_place_is_sent_without_a_copy() -> None:
    receiver, sender = ends(RingSize(4, 3))
    ring, form = sender.outgoing[0], Form((1,), torch.int32)
    for i in range(8):
        room = ring.room(form)
        assert (room is None) == (i >= 3)
        if room is None:
            room = form.empty()
        ring.put(room.fill_(i))
    assert sender.waiting() == 5
    for i in range(8):
        assert int(receiver.post(0, NUMBER).wait()) == i
        sender.push()


def test_nobody_is_woken_who_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, sender = ends(RingSize(4, 3))
    called: list[int] = []

    class Counting:
        def syscall(self, *args: object) -> int:
            called.append(1)
            return 0

    monkeypatch.setattr(shared_memory, "_libc", Counting())
    for i in range(5):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
        assert int(receiver.post(0, NUMBER).wait()) == i
    assert not called
    receiver.incoming[0].words.values[ASLEEP + PUBLISHED] = 1
    sender.outgoing[0].put(torch.tensor([5], dtype=torch.int32))
    assert len(called) == 1


def test_a_sleeping_receiver_is_woken_and_pushes_its_own_messages_meanwhile() -> None:
    """Two threads each wait for the other's second message, which finds room only while the other one waits."""
    a, b = SharedMemory({0: RingSize(4, 1)}, 20.0), SharedMemory({1: RingSize(4, 1)}, 20.0)
    a.connect(os.getpid(), b.descriptor, [1])
    b.connect(os.getpid(), a.descriptor, [0])
    found: dict[str, list[float]] = {}

    def run(name: str, memory: SharedMemory, out: int, into: int) -> None:
        for i in range(50):
            memory.outgoing[out].put(torch.tensor([float(i)]))
        found[name] = [float(arrival.wait()) for arrival in [memory.post(into, Form((1,), torch.float32)) for _ in range(50)]]
        memory.flush(0)

    threads = [threading.Thread(target=run, args=args) for args in (("a", a, 1, 0), ("b", b, 0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {"a": [float(i) for i in range(50)], "b": [float(i) for i in range(50)]}


def test_silence_ends_in_an_error() -> None:
    receiver, sender = ends(RingSize(4, 1), timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"did not come within 0\.3 s"):
        receiver.post(0, NUMBER).wait()
    sender.outgoing[0].put(torch.zeros(1))
    sender.outgoing[0].put(torch.zeros(1))
    with pytest.raises(TimeoutError, match="was not read"):
        sender.flush(0)


def test_large_messages_still_get_two_slots() -> None:
    assert RingSize(1 << 30, 16).slots == 2
    assert RingSize(1 << 20, 1000).slots == 64
    assert RingSize(10, 3).slots == 3
    assert RingSize(10, 3).merged(RingSize(7, 5)) == RingSize(10, 5)
