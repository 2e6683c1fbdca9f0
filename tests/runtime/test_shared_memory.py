"""Messages through shared memory: order, room, sleep, silence."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from gpp.runtime.transport.shared_memory import RingSize, SharedMemory, available, place

pytestmark = pytest.mark.skipif(not available(), reason="shared memory needs Linux on x86-64")


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
    into = [torch.empty_like(tensor) for tensor in sent]
    handles = [receiver.post(0, buffer) for buffer in into]
    got = torch.zeros(3, dtype=torch.bool)
    receiver.post(1, got).wait()
    for handle in handles:
        handle.wait()
    assert all(torch.equal(a, b) for a, b in zip(sent, into, strict=True))
    assert torch.equal(got, flags)


def test_a_sender_never_blocks_and_what_found_no_room_follows() -> None:
    receiver, sender = ends(RingSize(4, 2))
    for i in range(7):
        sender.outgoing[0].put(torch.tensor([i], dtype=torch.int32))
    assert sender.waiting() == 5
    seen = []
    for _ in range(7):
        buffer = torch.empty(1, dtype=torch.int32)
        receiver.post(0, buffer).wait()
        seen.append(int(buffer))
        sender.push()
    assert seen == list(range(7))
    assert sender.waiting() == 0


def test_the_hot_slot_is_used_again() -> None:
    receiver, sender = ends(RingSize(4, 8))
    buffer = torch.empty(1)
    for i in range(20):
        sender.outgoing[0].put(torch.tensor([float(i)]))
        receiver.post(0, buffer).wait()
    words = receiver.incoming[0].words.values
    assert set(words[2:10]) == {0}  # every message lay in slot 0
    assert (words[0], words[1]) == (20, 20)


def test_a_sleeping_receiver_is_woken_and_pushes_its_own_messages_meanwhile() -> None:
    """Two threads each wait for the other's second message, which finds room only while the other one waits."""
    a, b = SharedMemory({0: RingSize(4, 1)}, 20.0), SharedMemory({1: RingSize(4, 1)}, 20.0)
    a.connect(os.getpid(), b.descriptor, [1])
    b.connect(os.getpid(), a.descriptor, [0])
    found: dict[str, list[float]] = {}

    def run(name: str, memory: SharedMemory, out: int, into: int) -> None:
        for i in range(50):
            memory.outgoing[out].put(torch.tensor([float(i)]))
        buffers = [torch.empty(1) for _ in range(50)]
        for handle in [memory.post(into, buffer) for buffer in buffers]:
            handle.wait()
        memory.flush(0)
        found[name] = [float(buffer) for buffer in buffers]

    threads = [threading.Thread(target=run, args=args) for args in (("a", a, 1, 0), ("b", b, 0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {"a": [float(i) for i in range(50)], "b": [float(i) for i in range(50)]}


def test_silence_ends_in_an_error() -> None:
    receiver, sender = ends(RingSize(4, 1), timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"did not come within 0\.3 s"):
        receiver.post(0, torch.empty(1)).wait()
    sender.outgoing[0].put(torch.zeros(1))
    sender.outgoing[0].put(torch.zeros(1))
    with pytest.raises(TimeoutError, match="was not read"):
        sender.flush(0)


def test_large_messages_still_get_two_slots() -> None:
    assert RingSize(1 << 30, 16).slots == 2
    assert RingSize(1 << 20, 1000).slots == 64
    assert RingSize(10, 3).slots == 3
    assert RingSize(10, 3).merged(RingSize(7, 5)) == RingSize(10, 5)


def test_a_place_is_a_boot_and_a_network() -> None:
    assert place() == place()
