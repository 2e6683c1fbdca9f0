"""Messages between processes of one machine, through memory that both have mapped.

A channel is a ring buffer in the receiver's memory: the sender copies a tensor into a free slot and wakes the receiver
by a futex, and the receiver copies it out. A message of 32 KB costs some 15 us of a core, where gloo's loopback sockets
take 130 us and a third thread.

    words of a channel   published, consumed: messages so far (modulo 2^32; one writer each)
                         order[n]: the slot of message i is order[i mod n]
                         full[n]: 1 while slot i holds a message that was not read

A sender never blocks: a message without a free slot waits in the sender's own list until its next call.
The memory has no name (memfd), so nothing is left behind however a process ends.
Plain stores in program order are enough on x86-64 (total store order); elsewhere this memory is not used.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

FUTEX = 202
"""The number of the futex system call on x86-64."""
WAIT, WAKE = 0, 1
ALIGN = 64
HEADER_BYTES = 1 << 16
RING_BYTES = 64 << 20
"""Slots of one channel take at most this much, but there are always two."""
SPIN_S = 20e-6
"""A wait looks again and again for so long before it sleeps: a message that is about to come costs no system call."""
SLICE_S = 0.25
"""A sleeping wait looks up so often, lest the reason to wake was lost with a dead peer."""
BUSY_SLICE_S = 0.001
"""The same while own messages wait for free slots."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


def available() -> bool:
    """Whether messages can go through memory on this machine: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def place() -> tuple[int, int]:
    """Two numbers that are equal for processes that may share memory: numbers of the boot and the network namespace.

    A container or namespace with a network of its own counts as another machine.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = int(file.read().replace("-", "")[:15], 16)
    return boot, os.stat("/proc/self/ns/net").st_ino


class _Words:
    """A few 32-bit words of a mapping; processes can sleep on the first two."""

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self.values = memoryview(memory)[offset : offset + 4 * count].cast("I")
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self.addresses = [ctypes.c_void_p(address + 4 * i) for i in range(min(count, 2))]

    def wait(self, index: int, value: int, seconds: float) -> None:
        """Sleep until somebody wakes word `index`, unless it is not `value` any more."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        if _libc.syscall(FUTEX, self.addresses[index], WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0):
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, os.strerror(code))

    def wake(self, index: int) -> None:
        _libc.syscall(FUTEX, self.addresses[index], WAKE, 1, None, None, 0)


@dataclass(frozen=True, slots=True)
class RingSize:
    """Room that a channel needs: bytes of its largest message, and the number of messages in one pass."""

    message_bytes: int
    messages: int

    def merged(self, other: RingSize) -> RingSize:
        """Room for either."""
        return RingSize(max(self.message_bytes, other.message_bytes), max(self.messages, other.messages))

    @property
    def slots(self) -> int:
        return min(self.messages, max(2, RING_BYTES // self.message_bytes))

    @property
    def slot_bytes(self) -> int:
        return -(-self.message_bytes // ALIGN) * ALIGN

    @property
    def words_bytes(self) -> int:
        return -(-4 * (2 + 2 * self.slots) // ALIGN) * ALIGN


class RingBuffer:
    """One end of a channel."""

    def __init__(self, memory: mmap.mmap, offset: int, size: RingSize) -> None:
        self.size, n = size, size.slots
        self.words = _Words(memory, offset, 2 + 2 * n)
        self.order, self.full = 2, 2 + n
        start = offset + size.words_bytes
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=n * size.slot_bytes)
        self.data = [whole[i * size.slot_bytes : (i + 1) * size.slot_bytes] for i in range(n)]
        self.views: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
        self.waiting: deque[torch.Tensor] = deque()

    def view(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A slot as a tensor of the shape and type of `like`."""
        key = (slot, like.shape, like.dtype)
        found = self.views.get(key)
        if found is None:
            count = like.numel() * like.element_size()
            found = self.views[key] = self.data[slot][:count].view(like.dtype).view(like.shape)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Send a tensor, or keep it for later if no slot is free."""
        self.waiting.append(tensor)
        self.push()

    def push(self) -> bool:
        """Move waiting messages into free slots; returns whether none is left."""
        values, n = self.words.values, self.size.slots
        while self.waiting:
            # The lowest free slot, not the next one: the slot used last is still in the cache.
            slot = next((i for i in range(n) if not values[self.full + i]), None)
            if slot is None:
                return False
            tensor = self.waiting.popleft()
            self.view(slot, tensor).copy_(tensor)
            count = values[0]
            values[self.order + count % n] = slot
            values[self.full + slot] = 1
            values[0] = (count + 1) & 0xFFFFFFFF
            self.words.wake(0)
        return True

    def ready(self, index: int) -> bool:
        """Whether message number `index` has arrived."""
        return (self.words.values[0] - index - 1) & 0xFFFFFFFF < 0x80000000

    def take(self, index: int, buffer: torch.Tensor) -> None:
        """Copy message number `index` out and free its slot."""
        values = self.words.values
        slot = values[self.order + index % self.size.slots]
        buffer.copy_(self.view(slot, buffer))
        values[self.full + slot] = 0
        values[1] = (index + 1) & 0xFFFFFFFF
        self.words.wake(1)


class SharedMemory:
    """The ring buffers of one device: it reads from some, in memory of its own, and writes to others.

    Args:
        sizes: channel number -> room that it needs, for the channels on which this device receives.
        timeout_s: seconds after which a wait gives up.
    """

    def __init__(self, sizes: Mapping[int, RingSize], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        table, at = {}, HEADER_BYTES
        for number, size in sizes.items():
            table[number] = (at, size.message_bytes, size.messages)
            at += size.words_bytes + size.slots * size.slot_bytes
        header = json.dumps(table).encode()
        if len(header) >= HEADER_BYTES:
            raise OverflowError(f"{len(sizes)} channels do not fit into the table of {HEADER_BYTES} bytes")
        self.descriptor = os.memfd_create("gpp")
        os.ftruncate(self.descriptor, at)
        self._own = mmap.mmap(self.descriptor, at)
        self._own[: len(header)] = header
        self.incoming = {number: RingBuffer(self._own, place[0], RingSize(*place[1:])) for number, place in table.items()}
        self.outgoing: dict[int, RingBuffer] = {}
        self._posted = dict.fromkeys(self.incoming, 0)

    def connect(self, pid: int, descriptor: int, numbers: list[int]) -> None:
        """Map the memory of a receiver and take the named channels' other end.

        Raises:
            OSError: the receiver's memory is out of reach, as from another process namespace.
        """
        handle = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        memory = mmap.mmap(handle, os.fstat(handle).st_size)
        os.close(handle)
        table = json.loads(memory[:HEADER_BYTES].rstrip(b"\0"))
        for number in numbers:
            offset, *size = table[str(number)]
            self.outgoing[number] = RingBuffer(memory, offset, RingSize(*size))

    def post(self, number: int, buffer: torch.Tensor) -> Arrival:
        """The channel's next message, which is to end in `buffer`."""
        index = self._posted[number]
        self._posted[number] = index + 1
        return Arrival(self, self.incoming[number], index, buffer)

    def push(self) -> bool:
        """Send messages that found no slot before; returns whether none is left."""
        for ring in self.outgoing.values():
            if ring.waiting:
                ring.push()
        return not self.waiting()

    def waiting(self) -> int:
        """Number of messages that have found no slot yet."""
        return sum(len(ring.waiting) for ring in self.outgoing.values())

    def flush(self, limit: int) -> None:
        """Wait until at most `limit` messages are without a slot."""
        deadline = time.monotonic() + self.timeout_s
        while self.waiting() > limit and not self.push():
            full = next(ring for ring in self.outgoing.values() if ring.waiting)
            full.words.wait(1, full.words.values[1], BUSY_SLICE_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"a message was not read within {self.timeout_s:g} s")


class Arrival:
    """A message on its way."""

    __slots__ = ("_buffer", "_index", "_memory", "_ring")

    def __init__(self, memory: SharedMemory, ring: RingBuffer, index: int, buffer: torch.Tensor) -> None:
        self._memory, self._ring, self._index, self._buffer = memory, ring, index, buffer

    def wait(self) -> None:
        """Return when the buffer holds the message."""
        ring, index = self._ring, self._index
        if not ring.ready(index):
            self._sleep()
        ring.take(index, self._buffer)

    def _sleep(self) -> None:
        ring, memory, words = self._ring, self._memory, self._ring.words
        start = time.monotonic()
        while not ring.ready(self._index):
            idle = memory.push()
            seen = words.values[0]
            if ring.ready(self._index):
                return
            now = time.monotonic()
            if now - start < SPIN_S:
                continue
            if now - start > memory.timeout_s:
                raise TimeoutError(f"a message did not come within {memory.timeout_s:g} s")
            words.wait(0, seen, SLICE_S if idle else BUSY_SLICE_S)
