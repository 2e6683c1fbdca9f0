"""Messages between processes of one machine, through memory that both have mapped.

A channel is a ring buffer in the receiver's memory: the sender writes a message into a free slot, and the receiver reads
it where it lies. A message of 57 KB costs some 30 us of the sender, where gloo's loopback sockets take 130 us on either
side and a third thread.

    words of a channel   published, freed: messages and slots so far (modulo 2^32; one writer each)
                         asleep[2]: whether the receiver sleeps until `published` changes, the sender until `freed` does
                         order[n]: the slot of message i is order[i mod n]
                         full[n]: 1 while slot i holds a message that somebody may read

A message that is read in place is a tensor in the slot's memory, and the slot is free again when the last tensor on
that storage has gone, whoever held it: the graph of a forward, or a gradient that autograd did not copy. The storage
counts them, and the receiver looks at that count before its next message. The last `SPARE` slots are not lent, but
copied out and freed at once, so messages flow however many tensors are kept.

A sender never blocks: a message without a free slot waits in the sender's own list until its next call.
The memory has no name (memfd), so nothing is left behind however a process ends.
Plain stores in program order are enough on x86-64 (total store order); elsewhere this memory is not used. One thing needs
more: before a word `asleep` is read, what was published must have become visible, or both sides miss each other. A lock
that is taken does that (`_visible`); the sleeper has the kernel's own lock between its store and its last look.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gpp.runtime.transport.form import Form

FUTEX = 202
"""The number of the futex system call on x86-64."""
WAIT, WAKE = 0, 1
PUBLISHED, FREED, ASLEEP, ORDER = 0, 1, 2, 4
"""Words of a channel; the first ones of the two that say who sleeps, and of the table of slots."""
ALIGN = 64
HEADER_BYTES = 1 << 16
RING_BYTES = 64 << 20
"""Slots of one channel take at most this much, but there are always two."""
SPARE = 2
"""Slots of a channel in which no message stays: the sender writes one while the receiver copies another out."""
SPIN_S = 5e-3
"""A wait looks again and again for so long before it sleeps, where every worker has a core of its own: to wake a sleeper
takes the sender 150 us on a virtual machine, and the sleeper is there some 50 us later."""
YIELD_S = 100e-6
"""From then on it lets any other program have the core that wants it."""
SHORT_SPIN_S = 5e-6
"""The same where workers share cores: whoever spins takes the time from another."""
SLICE_S = 0.25
"""A sleeping wait looks up so often, lest the reason to wake was lost with a dead peer."""
BUSY_SLICE_S = 0.001
"""The same while own messages wait for free slots."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


_visible = threading.Lock()
"""To take it is a locked instruction, and all stores before one are visible before any load behind it."""


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
        self.values[ASLEEP + index] = 1
        failed = _libc.syscall(FUTEX, self.addresses[index], WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)
        self.values[ASLEEP + index] = 0
        if failed:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, os.strerror(code))

    def wake(self, index: int) -> None:
        """Wake whoever sleeps on word `index`, which has just been written."""
        with _visible:
            pass
        if self.values[ASLEEP + index]:
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
        return -(-4 * (ORDER + 2 * self.slots) // ALIGN) * ALIGN


def _references(storage: torch.UntypedStorage) -> int:
    """Tensors on a storage, those of autograd's graphs included."""
    return torch._C._storage_Use_Count(storage._cdata)


class RingBuffer:
    """One end of a channel."""

    def __init__(self, memory: mmap.mmap, offset: int, size: RingSize) -> None:
        self.size, self._count, self.lends = size, size.slots, True
        n = self._count
        self.words = _Words(memory, offset, ORDER + 2 * n)
        self.full = ORDER + n
        self.lent: dict[int, int] = {}
        """Slots in which somebody reads, and the references to their storage before."""
        self._wholes: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._memory, start = memory, offset + size.words_bytes
        self._slots = [start + i * size.slot_bytes for i in range(n)]
        self._places: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._filled: int | None = None
        self.waiting: deque[torch.Tensor] = deque()

    def _place(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A slot as a tensor, for copies in and out."""
        found = self._places.get((slot, shape, dtype))
        if found is None:
            start, size = self._slots[slot], math.prod(shape) * dtype.itemsize
            if slot not in self._wholes:
                # A storage for each slot, so that each has a count of its own.
                whole = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=self.size.slot_bytes)
                self._wholes[slot], self._storages[slot] = whole, whole.untyped_storage()
            found = self._places[slot, shape, dtype] = self._wholes[slot][:size].view(dtype).view(shape)
        return found

    def _free_slot(self) -> int | None:
        """The lowest free slot, not the next one: the slot used last is still in the cache."""
        values, full = self.words.values, self.full
        for i in range(self._count):
            if not values[full + i]:
                return i
        return None

    def room(self, form: Form) -> torch.Tensor | None:
        """The place of the next message, to be filled and given to `put`; None if it has none yet."""
        slot = None if self.waiting else self._free_slot()
        self._filled = slot
        return None if slot is None else self._place(slot, form.shape, form.dtype)

    def put(self, tensor: torch.Tensor) -> None:
        """Send a tensor, or keep it for later if no slot is free."""
        slot, self._filled = self._filled, None
        if slot is not None and tensor is self._place(slot, tensor.shape, tensor.dtype):
            self._publish(slot)
        elif self.waiting or (slot := self._free_slot()) is None:
            self.waiting.append(tensor)
        else:
            self._place(slot, tensor.shape, tensor.dtype).copy_(tensor)
            self._publish(slot)

    def push(self) -> bool:
        """Move waiting messages into free slots; returns whether none is left."""
        while self.waiting:
            slot = self._free_slot()
            if slot is None:
                return False
            tensor = self.waiting.popleft()
            self._place(slot, tensor.shape, tensor.dtype).copy_(tensor)
            self._publish(slot)
        return True

    def _publish(self, slot: int) -> None:
        values = self.words.values
        count = values[PUBLISHED]
        values[ORDER + count % self._count] = slot
        values[self.full + slot] = 1
        values[PUBLISHED] = (count + 1) & 0xFFFFFFFF
        self.words.wake(PUBLISHED)

    def ready(self, index: int) -> bool:
        """Whether message number `index` has arrived."""
        return (self.words.values[PUBLISHED] - index - 1) & 0xFFFFFFFF < 0x80000000

    def take(self, index: int, form: Form) -> torch.Tensor:
        """Message number `index`, which has arrived."""
        slot = self.words.values[ORDER + index % self._count]
        self.collect()
        place = self._place(slot, form.shape, form.dtype)
        if not self.lends or len(self.lent) >= self._count - SPARE:
            found = place.clone()
            self._free(slot)
            return found
        self.lent[slot] = _references(self._storages[slot])
        return place.detach()

    def collect(self) -> None:
        """Free the slots in which nobody reads any more."""
        lent, storages = self.lent, self._storages
        for slot in [slot for slot, before in lent.items() if _references(storages[slot]) <= before]:
            del lent[slot]
            self._free(slot)

    def _free(self, slot: int) -> None:
        values = self.words.values
        values[self.full + slot] = 0
        values[FREED] = (values[FREED] + 1) & 0xFFFFFFFF
        self.words.wake(FREED)


class SharedMemory:
    """The ring buffers of one device: it reads from some, in memory of its own, and writes to others.

    Args:
        sizes: channel number -> room that it needs, for the channels on which this device receives.
        timeout_s: seconds after which a wait gives up.

    A wait does not sleep for `spin_s` seconds. `idle`, if it is set, is called by every wait whose message has not come yet: there
    is time for what is due later.
    """

    def __init__(self, sizes: Mapping[int, RingSize], timeout_s: float) -> None:
        self.timeout_s, self.spin_s = timeout_s, SHORT_SPIN_S
        self.idle: Callable[[], None] | None = None
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

    def close(self) -> None:
        """Give the descriptor back; a mapping ends when the last message that is read in it is gone."""
        os.close(self.descriptor)

    def post(self, number: int, form: Form) -> Arrival:
        """The channel's next message."""
        index = self._posted[number]
        self._posted[number] = index + 1
        return Arrival(self, self.incoming[number], index, form)

    def push(self) -> bool:
        """Send messages that found no slot before; returns whether none is left."""
        for ring in self.outgoing.values():
            if ring.waiting:
                ring.push()
        return not self.waiting()

    def push_until(self, over: Callable[[], bool]) -> None:
        """Send messages that found no slot before, until none is left or something else is over."""
        while not self.push() and not over():
            time.sleep(BUSY_SLICE_S)

    def waiting(self) -> int:
        """Number of messages that have found no slot yet."""
        return sum([len(ring.waiting) for ring in self.outgoing.values()])

    def flush(self, limit: int) -> None:
        """Wait until at most `limit` messages are without a slot."""
        if self.waiting() <= limit:
            return
        deadline = time.monotonic() + self.timeout_s
        while self.waiting() > limit and not self.push():
            full = next(ring for ring in self.outgoing.values() if ring.waiting)
            full.words.wait(FREED, full.words.values[FREED], BUSY_SLICE_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"a message was not read within {self.timeout_s:g} s")


class Arrival:
    """A message on its way."""

    __slots__ = ("_form", "_index", "_memory", "_ring")

    def __init__(self, memory: SharedMemory, ring: RingBuffer, index: int, form: Form) -> None:
        self._memory, self._ring, self._index, self._form = memory, ring, index, form

    def wait(self) -> torch.Tensor:
        """The message, when it has come."""
        ring, index = self._ring, self._index
        if not ring.ready(index):
            self._sleep()
        return ring.take(index, self._form)

    def _sleep(self) -> None:
        ring, memory, words = self._ring, self._memory, self._ring.words
        start = time.monotonic()
        ring.collect()
        if memory.idle:
            memory.idle()
        while not ring.ready(self._index):
            idle = memory.push()
            seen = words.values[PUBLISHED]
            if ring.ready(self._index):
                return
            now = time.monotonic()
            if now - start < memory.spin_s:
                if now - start > YIELD_S:
                    os.sched_yield()
                continue
            if now - start > memory.timeout_s:
                raise TimeoutError(f"a message did not come within {memory.timeout_s:g} s")
            words.wait(PUBLISHED, seen, SLICE_S if idle else BUSY_SLICE_S)
