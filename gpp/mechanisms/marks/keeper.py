"""Between the forward and the backward of a micro-batch: what its stage holds, discards, or has on the host.

One pair of saved-tensor hooks does all of it, because only the innermost pair acts in PyTorch; a weight policy's own
hooks come first inside it. A storage belongs to the operator that makes it, and is known by a weak reference, since
addresses return. The stage's code tells which node it calls (`gpp.capture.emit.Watcher`): a storage that autograd saves
and that nobody has seen before is made inside that node. A tensor on a storage of a discarded operator is saved as a
`View` of a `Slot`, which is empty. The first one that the backward asks for has the slot's run called again, by
generated code; every slot of the run that is still wanted is filled, and empties as autograd lets go of the views on it.
So the run is found again by the order of its nodes and of the storages within a node, which is the same both times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp.capture.emit import Watcher
from gpp.capture.stage import StageModule
from gpp.mechanisms.marks.host import AbstractCopies
from gpp.mechanisms.marks.nodes import KEPT, MOVED, NodeMarks
from gpp.mechanisms.marks.slots import STAYS, Key, Made, ReadValue, Slot, View, Watch, flat, given, held, told
from gpp.runtime.worker.around import AbstractAround, SavedHooks
from gpp.runtime.worker.stage import Span


class _Code(NamedTuple):
    """What is called again for some storages of a run: nodes that it reads, place of the first that it calls."""

    call: Callable[[int, Watcher, Sequence[Any]], None]
    reads: tuple[str, ...]
    first: int


class _DiscardedRun:
    """One run of a micro-batch, of which nothing is there until it is called again.

    Args:
        number: of the run.

    `inputs` are the values that it reads, by node; `states` those of the random generators, by place; `slots` those of its
    storages that somebody wants.
    """

    def __init__(self, keeper: Keeper, number: int, batch: int) -> None:
        self.keeper, self.number, self.batch = keeper, number, batch
        self.inputs: dict[str, Any] = {}
        self.states: dict[int, list[Tensor]] = {}
        self.slots: dict[Key, weakref.ref[Slot]] = {}
        self.code: _Code

    def wanted(self) -> frozenset[int]:
        """Places of the nodes whose storages are wanted."""
        return frozenset(place for (place, _), slot in self.slots.items() if slot() is not None)

    def settle(self) -> None:
        """The forward is over: hold no more than the second call needs."""
        if wanted := self.wanted():
            self.code = self.keeper.code(self.number, wanted)
            self.inputs = {name: self.inputs[name] for name in self.code.reads}
        else:
            self.inputs, self.states = {}, {}

    def again(self) -> None:
        """Call the nodes again, and fill the slots; once."""
        if not self.slots:
            return
        values = [given(value) for value in self.inputs.values()]
        self.inputs = {}
        watcher = _RepeatWatch(self, values, self.keeper.generators)
        with self.keeper.repeating(draws=bool(self.states)), saved_tensors_hooks(watcher.pack, _never):
            self.code.call(self.batch, watcher, values)
        watcher.forget()
        self.slots, self.states = {}, {}


def _never(_: None) -> Tensor:
    raise RuntimeError("a second forward has no backward of its own")


class Forward(Watch):
    """The watcher and the hooks of a forward."""

    def __init__(self, keeper: Keeper, hooks: SavedHooks | None) -> None:
        super().__init__(keeper.marks.way)
        self.keeper, self._hooks, self._readers = keeper, hooks, keeper.readers
        self.moved: list[weakref.ref[Slot]] = []
        self.runs: list[_DiscardedRun] = []

    def given(self, batch: int, arguments: Sequence[Tensor]) -> None:
        self.others(arguments)
        for number, run in enumerate(self.keeper.marks.runs):
            own = _DiscardedRun(self.keeper, number, batch)
            for i, name in self.keeper.arguments[number]:
                tensor = arguments[i]
                # All of them are leaves: there is nothing to detach.
                own.inputs[name] = ReadValue(tensor.detach().clone(), tensor.requires_grad) if name in run.copied else tensor
            self.runs.append(own)

    def draws(self, place: int) -> None:
        run = self.runs[self.keeper.marks.way[place]]
        run.states[place] = [generator.get_state() for generator in self.keeper.generators]

    def made(self, place: int, following: int, value: Any) -> None:
        self.place = following
        self.note(value, place)
        name = self.keeper.marks.calls[place]
        if name in self.keeper.marks.stays:
            self._stay(value)
        for number in self._readers[place]:
            self.runs[number].inputs[name] = held(value, lambda tensor, n=number: self._hold(tensor, n))

    def _stay(self, value: Any) -> None:
        """The storages of a value are not let go of, whoever has made them."""
        if isinstance(value, (tuple, list)):
            for part in value:
                self._stay(part)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()._cdata
            made = self.known[storage]
            if made.way >= 0:
                if made.slot is not None:
                    # Autograd has it already: it is not among those that are made again.
                    made.slot.base = value.detach()
                    del self.runs[made.way].slots[made.key]
                self.known[storage] = STAYS

    def _hold(self, tensor: Tensor, number: int) -> ReadValue:
        """A value for a run."""
        if tensor.layout is torch.strided and told(tensor):
            made = self.known[tensor.untyped_storage()._cdata]
            if made.way == MOVED or made.way in self.keeper.marks.runs[number].behind:
                return ReadValue(View(self._slot(made, tensor), tensor), tensor.requires_grad)
        return ReadValue(tensor.detach(), tensor.requires_grad)

    def _slot(self, made: Made, tensor: Tensor) -> Slot:
        """The slot of a storage that does not stay."""
        if made.slot is None:
            if made.way == MOVED:
                made.slot = Slot(tensor.detach(), None)
                self.moved.append(weakref.ref(made.slot))
            else:
                run = self.runs[made.way]
                made.slot = Slot(None, run.again)
                run.slots[made.key] = weakref.ref(made.slot)
        return made.slot

    def pack(self, tensor: Tensor) -> Any:
        """The hook of a tensor that autograd saves."""
        if self._hooks:
            packed = self._hooks[0](tensor)
            if packed is not tensor:
                return packed
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        made = self.known.get(storage._cdata) or self.register(storage, tensor, self.place)
        return tensor if made.way == KEPT or not told(tensor) else View(self._slot(made, tensor), tensor)

    def unpack(self, packed: Any) -> Tensor:
        """The hook of a backward that wants it."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, View):
            return packed.tensor()
        assert self._hooks is not None
        return self._hooks[1](packed)

    def settle(self) -> None:
        """The forward is over."""
        # A run that reads views of another's storages wants them only if it is wanted itself.
        for run in sorted(self.runs, key=lambda run: len(self.keeper.marks.runs[run.number].behind), reverse=True):
            run.settle()
        self.runs = []


class _RepeatWatch(Watch):
    """The watcher and the hook of a run that is called again: it fills the slots, and holds nothing else."""

    def __init__(self, run: _DiscardedRun, values: Sequence[Any], generators: Sequence[torch.Generator]) -> None:
        super().__init__(run.keeper.marks.way)
        self._run, self._generators = run, generators
        self.place = run.code.first
        self.others(values)

    def draws(self, place: int) -> None:
        for generator, state in zip(self._generators, self._run.states[place], strict=True):
            generator.set_state(state)

    def register(self, storage: torch.UntypedStorage, tensor: Tensor, place: int) -> Made:
        made = super().register(storage, tensor, place)
        slot = wanted() if (wanted := self._run.slots.get(made.key)) else None
        if slot is not None:
            slot.base = tensor.detach()
        return made

    def made(self, place: int, following: int, value: Any) -> None:
        self.place = following
        self.note(value, place)

    def pack(self, tensor: Tensor) -> None:
        self.note(tensor, self.place)


class Keeper(AbstractAround):
    """Carries out the policy of one stage on one device.

    Args:
        generators: what passes draw random numbers from.
        copies: to the host and back; None where the stage moves nothing.
    """

    def __init__(
        self,
        module: StageModule,
        marks: NodeMarks,
        *,
        generators: Sequence[torch.Generator],
        copies: AbstractCopies | None,
    ) -> None:
        self.module, self.marks, self.generators = module, marks, generators
        self.readers = marks.readers
        self.arguments = [[(i, name) for i, name in enumerate(module.arguments) if name in run.reads] for run in marks.runs]
        self._copies = copies
        self._codes: dict[tuple[int, frozenset[int]], _Code] = {}
        self._moved: dict[int, list[weakref.ref[Slot]]] = {}
        self._under_way: dict[int, _Moving] = {}
        module.watch(marks.draws)

    @contextmanager
    def forward(self, microbatch: int, hooks: SavedHooks | None) -> Iterator[Forward]:
        """Context of a forward, with its watcher.

        Args:
            hooks: of the weight policy.
        """
        self._leave()
        forward = Forward(self, hooks)
        try:
            with saved_tensors_hooks(forward.pack, forward.unpack):
                yield forward
        finally:
            forward.forget()
        forward.settle()
        if forward.moved:
            self._moved[microbatch] = forward.moved

    @contextmanager
    def repeating(self, *, draws: bool) -> Iterator[None]:
        """Context in which a run is called again."""
        states = [generator.get_state() for generator in self.generators] if draws else []
        with torch.enable_grad():
            try:
                yield
            finally:
                for generator, state in zip(self.generators, states, strict=False):
                    generator.set_state(state)

    def code(self, run: int, wanted: frozenset[int]) -> _Code:
        """What is called again for the storages that the nodes at these places make."""
        key = run, wanted
        if key not in self._codes:
            nodes = self.marks.needed(run, wanted)
            call, reads = self.module.part(nodes, self.marks.draws)
            self._codes[key] = _Code(call, reads, min(self.marks.place[name] for name in nodes))
        return self._codes[key]

    def copy_out(self, microbatch: int) -> Span | None:
        """Begin to move what the forward of a micro-batch has left for the host; when that begins and ends, if it left anything."""
        slots = [slot for reference in self._moved.pop(microbatch, ()) if (slot := reference()) is not None]
        if not slots:
            return None
        assert self._copies is not None
        moving = self._under_way[microbatch] = _Moving(slots, self._copies)
        return moving.copying.span

    def fetch(self, microbatch: int) -> Span | None:
        """Begin to bring it back.

        If another micro-batch is back and has not been used, all that goes must have gone before: two are on the device at most.
        """
        moving = self._under_way.get(microbatch)
        if moving is None:
            return None
        if any(other.turned for other in self._under_way.values()):
            self._leave()
        return moving.turn()

    def arrive(self, microbatch: int) -> None:
        """Before a backward: wait until all of its micro-batch is there."""
        self._moved.pop(microbatch, None)
        if microbatch in self._under_way:
            self._under_way.pop(microbatch).arrive()
        for moving in self._under_way.values():
            moving.look()

    def _leave(self) -> None:
        """Before a forward: wait until what others have left for the host is there."""
        for moving in self._under_way.values():
            moving.leave()


class _Moving:
    """What a micro-batch has on the host; `copying` is the copy that was begun last."""

    def __init__(self, slots: Sequence[Slot], copies: AbstractCopies) -> None:
        self._slots, self._copies = [weakref.ref(slot) for slot in slots], copies
        self._tensors = [flat(slot.base) for slot in slots if slot.base is not None]
        self._buffers = [copies.take(tensor) for tensor in self._tensors]
        self.copying = copies.copy(self._buffers, self._tensors, out=True)
        self.turned = self._left = False

    def look(self) -> None:
        """Let go of the device's storages if they have been copied."""
        if not self._left and self.copying.gone():
            self.leave()

    def leave(self) -> None:
        """Wait for that."""
        if self._left:
            return
        self._left = True
        self.copying.wait()
        self._tensors = []
        self._fill([None] * len(self._slots))

    def turn(self) -> Span:
        """Begin to bring them back, once; when that begins and ends."""
        if not self.turned:
            self.leave()
            self.turned = True
            # Made by the worker's own thread, whose allocator's account they are in, and on the stream that uses them. They are
            # written when that has come here: their memory may have been another's.
            self._tensors = [torch.empty(b.shape, dtype=b.dtype, device=self._copies.device) for b in self._buffers]
            self.copying = self._copies.copy(self._tensors, self._buffers, out=False)
        return self.copying.span

    def arrive(self) -> None:
        """Wait until they are back."""
        self.turn()
        self.copying.wait()
        self._copies.give(self._buffers)
        self._fill(self._tensors)

    def _fill(self, tensors: Sequence[Tensor | None]) -> None:
        """Let those slots have tensors that somebody still wants."""
        for reference, tensor in zip(self._slots, tensors, strict=True):
            if (slot := reference()) is not None:
                slot.base = tensor
