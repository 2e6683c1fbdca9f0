"""A card that follows the rules of CUDA and NCCL in one process, for tests: `run` runs workers on such cards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, final

import torch

from gpp.runtime.cards.card import AbstractCard, CardCommunicator, CardEvent, CardStream, CardWork
from tests.support.cards.blocks import Block, Blocks
from tests.support.cards.calls import Calls
from tests.support.cards.faults import Misuse
from tests.support.cards.forms import Form, New
from tests.support.cards.hosts import ThreadHost
from tests.support.cards.kernels import DEVICE, Kernels
from tests.support.cards.machine import Machine
from tests.support.cards.meetings import Group, Part
from tests.support.cards.memory import use_on_host
from tests.support.cards.operations import Op, Queue

T = TypeVar("T")

_FORMS: dict[tuple[object, ...], tuple[Form, bool] | None] = {}


def run(machine: Machine, programs: Sequence[Callable[[ModelCard], T]]) -> list[T]:
    """Run one worker's program on each card of a machine, in threads that take turns.

    Returns:
        What the programs return, by worker.

    Raises:
        Fault: what the model finds.
    """
    blocks = Blocks()
    threads = torch.get_num_threads()

    def start(number: int) -> T:
        torch.set_num_threads(threads)
        return cards[number].start(programs[number])

    hosts = [machine.thread(lambda number=number: start(number)) for number in range(len(programs))]
    cards = [ModelCard(machine, host, blocks) for host in hosts]
    # A run makes many small objects, of which few lie in cycles: it is slow to look for those as often as Python does.
    often, state = gc.get_threshold(), torch.get_rng_state()
    gc.set_threshold(100_000, *often[1:])
    try:
        with torch._C._AutoDispatchBelowAutograd():
            machine.run()
    finally:
        gc.set_threshold(*often)
        torch.set_rng_state(state)
    return [host.result for host in hosts]  # pyright: ignore[reportReturnType]


@final
class ModelCard(AbstractCard):
    """A worker's card. `run` makes it.

    Args:
        machine: runs all cards.
        host: the worker's.
        blocks: all memory of the machine's cards.
    """

    def __init__(self, machine: Machine, host: ThreadHost, blocks: Blocks) -> None:
        self.device, self.machine, self.host, self.blocks = DEVICE, machine, host, blocks
        self.compute = self.current = host.queue("compute stream")
        self.kernels = Kernels(self, _FORMS)
        self.calls = Calls(self)
        self._numbers = iter(range(1, 1 << 30))
        self._random = torch.get_rng_state()
        self._peak = 0
        host.switched = (self._go, self._stop)

    def start(self, program: Callable[[ModelCard], T]) -> T:
        """Run the worker's program in this thread."""
        self._go()
        with self.kernels, self.calls:
            return program(self)

    # Each worker has random numbers of its own, as in a process of its own.
    def _go(self) -> None:
        torch.default_generator.set_state(self._random)

    def _stop(self) -> None:
        self._random = torch.default_generator.get_state()

    def make(self, key: New, name: str) -> tuple[torch.Tensor, Block]:
        """A tensor in fresh memory of the current stream, filled with what is no number."""
        self.host.allocate(self.current)
        tensor, block = self.blocks.make(key.shape, key.stride, key.dtype, self.host, self.current, name)
        self.host.made(block.memory)
        return tensor, block

    def factory_on_card(self) -> bool:
        return self.calls.factory_on_card()

    def block(self, tensor: torch.Tensor) -> Block:
        """The memory of a tensor on this card.

        Raises:
            Misuse: it lies elsewhere.
        """
        block = self.blocks.find(tensor)
        if block is None or block.pinned or block.host is not self.host:
            raise Misuse(f"{self.host.name}: a tensor of shape {tuple(tensor.shape)} does not lie on this card")
        return block

    def stream(self) -> CardStream:
        return ModelStream(self, self.host.queue(f"stream {next(self._numbers)}"))

    def use(self, stream: CardStream) -> AbstractContextManager[object]:
        assert isinstance(stream, ModelStream) and stream.card is self
        return self._using(stream.queue)

    @contextmanager
    def _using(self, queue: Queue) -> Iterator[None]:
        before, self.current = self.current, queue
        try:
            yield
        finally:
            self.current = before

    def event(self, *, timed: bool = False) -> CardEvent:
        return ModelEvent(self, timed)

    def seconds(self, start: CardEvent, end: CardEvent) -> float:
        assert isinstance(start, ModelEvent) and isinstance(end, ModelEvent)
        return end.time_s() - start.time_s()

    def keep(self, tensor: torch.Tensor, stream: CardStream | None = None) -> None:
        assert stream is None or isinstance(stream, ModelStream)
        self.block(tensor).memory.kept.add(self.current if stream is None else stream.queue)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.kernels.off():
            if self.calls.lies_on_card(tensor):
                raise Misuse(f"{self.host.name}: only main memory can be pinned, not a tensor on a card")
            like = torch.empty_like(tensor)
            made, _ = self.blocks.make(like.shape, like.stride(), like.dtype, self.host, None, "pinned memory")
            return made.copy_(tensor)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        source = self.blocks.find(tensor)
        if source is not None and not source.pinned:
            raise Misuse(f"{self.host.name}: upload of a tensor that lies on a card already")
        with self.kernels.off():
            like = torch.empty_like(tensor)
            made, block = self.make(New(tuple(like.shape), like.stride(), like.dtype), "upload")
            if source is not None:
                use_on_host(self.host, source.memory, writes=False)
            self.kernels.upload(made, block, tensor, source, blocking=False)
        return made

    def communicator(self, ranks: Sequence[int], name: str) -> CardCommunicator | None:
        group, wait = self.machine.gather(self.host, ranks, name)
        self.host.wait(wait)
        return ModelCommunicator(self, group) if self.host.rank in group.ranks else None

    def peak_memory_bytes(self) -> int:
        return self.host.peak_bytes

    def reset_peak(self) -> None:
        self.host.peak_bytes = self.host.live_bytes

    def device_wait(self) -> None:
        """Make the host wait for everything queued on the card, communication included (`torch.cuda.synchronize`)."""
        self.host.wait(self.host.everything())


@final
class ModelStream:
    """A stream of a card."""

    def __init__(self, card: ModelCard, queue: Queue) -> None:
        self.card, self.queue = card, queue

    def synchronize(self) -> None:
        """Make the host wait for everything queued on it."""
        host = self.card.host
        host.wait(host.until([self.queue.point()], "wait for a stream"))


@final
class ModelEvent:
    """A point in a stream."""

    def __init__(self, card: ModelCard, timed: bool) -> None:
        self.card, self.timed = card, timed
        self._recorded = False
        self._op: Op | None = None

    def record(self) -> None:
        """Put the event behind what is queued on the current stream."""
        if self._recorded:
            raise Misuse(f"{self.card.host.name} records an event twice")
        self._recorded, self._op = True, self.card.current.point()

    def _after(self) -> Op | None:
        if not self._recorded:
            raise Misuse(f"{self.card.host.name} waits for an event that was not recorded, which waits for nothing")
        return self._op

    def wait(self) -> None:
        """Make the current stream wait for the event."""
        self.card.host.order(self.card.current, self._after())

    def query(self) -> bool:
        """Whether the event is done."""
        op = self._after()
        return op is None or self.card.host.saw(op)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        host = self.card.host
        host.wait(host.until([self._after()], "wait for an event"))

    def time_s(self) -> float:
        """When it was done, on the model's clock."""
        if not self.timed or not self.query():
            raise Misuse(f"{self.card.host.name} asks for the time of an event that is not timed, or not done")
        return self._op.end_s if self._op else 0.0


@final
class ModelWork:
    """An operation of a communicator."""

    def __init__(self, card: ModelCard, op: Op) -> None:
        self.card, self.op = card, op

    def wait(self) -> None:
        """Make the current stream wait for the operation."""
        self.card.host.order(self.card.current, self.op)

    def is_completed(self) -> bool:
        """Whether the operation is over."""
        return self.card.host.saw(self.op)


@final
class ModelCommunicator:
    """One member's end of a communicator."""

    def __init__(self, card: ModelCard, group: Group) -> None:
        self.card, self.group = card, group

    def send(self, tensor: torch.Tensor, peer: int) -> CardWork:
        card, (size, part) = self.card, self._part(tensor, _move)
        card.host.wait(self.group.connect(card.host, peer))
        return ModelWork(card, self.group.send(card.host, peer, size, after=card.current, part=part))

    def receive(self, tensor: torch.Tensor, peer: int) -> CardWork:
        card, (size, part) = self.card, self._part(tensor, _move)
        card.host.wait(self.group.connect(card.host, peer))
        return ModelWork(card, self.group.receive(card.host, peer, size, after=card.current, part=part))

    def sum(self, tensor: torch.Tensor) -> CardWork:
        card, (size, part) = self.card, self._part(tensor, _sum)
        card.host.wait(self.group.connect(card.host))
        return ModelWork(card, self.group.sum(card.host, size, after=card.current, part=part))

    def _part(self, tensor: torch.Tensor, move: Callable[[dict[int, Any]], None]) -> tuple[str, Part]:
        block = self.card.block(tensor)
        if not tensor.is_contiguous():
            raise Misuse(f"{self.card.host.name}: a message of shape {tuple(tensor.shape)} is not contiguous")
        with torch._C._DisableTorchDispatch():
            flat = block.tensor((tensor.dtype, (tensor.numel(),), (1,), int(tensor.storage_offset())))
        return f"{tensor.numel()} values of {tensor.dtype}", Part(block.memory, flat, move)


def _move(parts: dict[int, Any]) -> None:
    parts[1].copy_(parts[0])


def _sum(parts: dict[int, Any]) -> None:
    # In the order of ranks, so that the last bit is the same each time.
    first, *others = [part for _, part in sorted(parts.items())]
    total = first.clone()
    for part in others:
        total += part
    for part in parts.values():
        part.copy_(total)
