"""Kernels: torch's operators on memory of a card are queued, and the host goes on.

The mode below stands under autograd in the thread of a worker. An operator that touches memory of the card, or makes
some, becomes an operation of the current stream; its results are there at once and are filled later. Operators on main
memory run at once. Random numbers are drawn as of the launch: the values are those of a run without cards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cards.blocks import Block, Key
from tests.support.cards.faults import Misuse
from tests.support.cards.forms import Form, New, Operator, Part, Same, aten, form_of, operator, substitute, zeros
from tests.support.cards.memory import use_on_host
from tests.support.cards.operations import Memory, Op

if TYPE_CHECKING:
    from tests.support.cards.card import ModelCard

DEVICE = torch.device("cpu", 0)
"""What tensors on a card are made on. Tensors of main memory are on `cpu` without a number."""

_MAIN = torch.device("cpu")
_COPIES = {aten.copy_.default, aten._to_copy.default}


@final
class _Call:
    """The arguments of one call, as they are gone through."""

    def __init__(self) -> None:
        self.key: list[object] = []
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        """The arguments with the kernels' tensors in place of the program's."""
        self.tensors: list[torch.Tensor] = []
        self.blocks: list[Block] = []
        self.keys: list[Key] = []
        self.host: list[torch.Tensor] = []
        self.pinned: list[Block] = []
        self.values: dict[int, torch.Tensor] = {}


@final
class Kernels(TorchDispatchMode):
    """Queues kernels on a card.

    Args:
        card: whose thread this is.
        forms: what operators return, by operator and forms of the inputs; shared by all cards.
    """

    def __init__(self, card: ModelCard, forms: dict[tuple[object, ...], tuple[Form, bool] | None]) -> None:
        super().__init__()
        self.card, self.host, self.blocks = card, card.host, card.blocks
        self._forms = forms
        self._operators: dict[int, Operator] = {}
        # By identity, as torch's own hash of an operator is slow; operators live as long as torch.
        self._off = 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which operators run at once, whatever they touch."""
        self._off += 1
        try:
            with torch.no_grad():
                yield
        finally:
            self._off -= 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing here is compiled, and the guard against that costs time in every call.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        info = self._operators.get(id(func))
        if info is None:
            info = self._operators[id(func)] = operator(func)
        if info.on_host:
            return func(*args, **kwargs)
        call = _Call()
        read = self._read
        for value in args:
            call.args.append(read(value, call))
        for name, value in kwargs.items():
            if name == "device":
                call.kwargs[name] = _MAIN
            else:
                call.key.append(name)
                call.kwargs[name] = read(value, call)
        on_card = bool(call.blocks) or (kwargs.get("device") == DEVICE)
        if not on_card and info.device and not call.host and not call.pinned:
            on_card = self.card.factory_on_card() and func is not aten.scalar_tensor.default
        if not on_card:
            return self._main_memory(func, info, call, args, kwargs)
        if func in _COPIES:
            copied = self._copy(func, call, args, kwargs)
            if copied is not None:
                return copied
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _MAIN}
        if call.host:
            self._take_numbers(info, call)
            call.args, call.kwargs = substitute(list(args), call.values), _substituted(kwargs, call.values)
        if info.waits or (info.indexed and _masked(args[1])):
            return self._now(func, info, call, args, kwargs)
        return self._launch(func, info, call, args, kwargs)

    def _take_numbers(self, info: Operator, call: _Call) -> None:
        """What a kernel takes from main memory, as it is at the launch.

        Raises:
            Misuse: more than single numbers, or indices.
        """
        for block in call.pinned:
            use_on_host(self.host, block.memory, writes=False)
        for one in call.host:
            if one.dim() == 0:
                call.values[id(one)] = one.clone()
            elif info.indexed:
                self.host.wait(self.host.until([self.card.current.point()], "upload of memory that is not pinned"))
                call.values[id(one)] = one.clone()
            else:
                raise Misuse(
                    f"{info.name} on {self.host.name}: tensors of shape {tuple(one.shape)} lie in main memory, others on a card"
                )

    def _read(self, value: Any, call: _Call) -> Any:
        """Go through an argument; returns what the kernel gets for it."""
        if isinstance(value, torch.Tensor):
            block = self.blocks.of.get(value.untyped_storage()._cdata)
            if block is None or block.pinned:
                call.key.append(value.dtype)
                call.host.append(value)
                if block is not None:
                    call.pinned.append(block)
                return value
            if block.host is not self.host:
                raise Misuse(f"{self.host.name} uses {block.memory}, which lies on the card of {block.host.name}")
            key = _key(value)
            call.tensors.append(value)
            call.blocks.append(block)
            call.keys.append(key)
            call.key.append(key[:3])
            inner = call.values[id(value)] = block.tensor(key)
            return inner
        kind = type(value)
        if kind is list or kind is tuple:
            call.key.append(len(value))
            return [self._read(one, call) for one in value]
        if kind is float:
            # No form hangs on it, but for that of a range.
            call.key.append(float if call.tensors else (float, value))
        elif kind is bool:
            call.key.append((bool, value))
        else:
            call.key.append(value)
        return value

    def _main_memory(self, func: Any, info: Operator, call: _Call, args: Any, kwargs: Any) -> Any:
        if call.pinned:
            written = {id(block) for block in self._written(info, args, kwargs)}
            for block in call.pinned:
                use_on_host(self.host, block.memory, writes=id(block) in written)
        return func(*args, **kwargs)

    def _written(self, info: Operator, args: Any, kwargs: Any) -> list[Block]:
        places = info.writes
        if info.silent is not None and args[info.silent[1]]:
            places += info.silent[0]
        out = []
        for value in [*(args[i] for i in places if i < len(args)), *(kwargs[n] for n in info.written if n in kwargs)]:
            for one in value if isinstance(value, list | tuple) else [value]:
                if one is not None and (block := self.blocks.find(one)) is not None:
                    out.append(block)
        return out

    def _launch(self, func: Any, info: Operator, call: _Call, args: Any, kwargs: Any) -> Any:
        """Queue a kernel, and make what it returns."""
        key = (id(func), None if call.tensors else torch.get_default_dtype(), *call.key)
        known, drawn = self._forms.get(key), None
        if key not in self._forms or (known is not None and known[1]):
            # A run on zeros tells the form, and draws as many random numbers as the kernel will.
            drawn = torch.get_rng_state() if info.draws else None
            generator = kwargs.get("generator")
            if generator is not None:
                drawn = generator.get_state()
            tried = self._try(func, call, args, kwargs)
            if drawn is not None:
                after = generator.get_state() if generator is not None else torch.get_rng_state()
                if torch.equal(after, drawn):
                    drawn = None
            known = self._forms[key] = None if tried is None else (tried[0], drawn is not None)
        if known is None:
            return self._now(func, info, call, args, kwargs)
        form = known[0]
        made: list[torch.Tensor] = []
        fresh: list[Memory] = []
        out = self._results(form, call, info.name, made, fresh)
        writes = [block.memory for block in self._written(info, args, kwargs)] if info.writes or info.written or info.silent else []
        if func in _EMPTY:
            return out
        run = _run(func, call.args, call.kwargs, form, made)
        if drawn is not None:
            run = _with_state(run, drawn, call.kwargs)
        reads = [block.memory for block in call.blocks]
        if writes:
            reads = [memory for memory in reads if memory not in writes]
        self.host.launch(self.card.current, info.name, run=run, reads=reads, writes=writes + fresh)
        return out

    def _try(self, func: Any, call: _Call, args: Any, kwargs: Any) -> tuple[Form] | None:
        trial = {id(one): zeros(key) for one, key in zip(call.tensors, call.keys, strict=True)}
        inputs = [trial[id(one)] for one in call.tensors]
        values = {**call.values, **trial}
        try:
            result = func(*substitute(args, values), **_substituted(kwargs, values))
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None  # Zeros will not do. The run on the values themselves raises what is to be raised.
        return (form_of(result, inputs),)

    def _results(self, form: Form, call: _Call, name: str, made: list[torch.Tensor], fresh: list[Memory]) -> Any:
        if isinstance(form, New):
            tensor, block = self.card.make(form, name)
            made.append(block.data)
            fresh.append(block.memory)
            return tensor
        if isinstance(form, Same):
            return call.tensors[form.number]
        if isinstance(form, Part):
            base = call.tensors[form.number]
            return torch.as_strided(base, form.shape, form.stride, base.storage_offset() + form.offset)
        if isinstance(form, list | tuple):
            return type(form)([self._results(one, call, name, made, fresh) for one in form])
        return form

    def _now(self, func: Any, info: Operator, call: _Call, args: Any, kwargs: Any) -> Any:
        """Queue a kernel and wait for what it returns."""
        box: list[Any] = []
        state = torch.get_rng_state() if info.draws else None

        def run() -> None:
            if state is not None:
                torch.set_rng_state(state)
            try:
                box.append(func(*call.args, **call.kwargs))
            except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
                box.append(error)
            if state is not None:
                box.append(torch.get_rng_state())

        writes = [block.memory for block in self._written(info, args, kwargs)]
        reads = [block.memory for block in call.blocks if block.memory not in writes]
        op = self.host.launch(self.card.current, info.name, run=run, reads=reads, writes=writes)
        self.finish(op, f"result of {info.name}")
        if state is not None:
            torch.set_rng_state(box[1])
        result = box[0]
        if isinstance(result, Exception):
            raise result
        form = form_of(result, [call.values[id(one)] for one in call.tensors])
        made: list[torch.Tensor] = []
        fresh: list[Memory] = []
        out = self._results(form, call, info.name, made, fresh)
        fill = _run(lambda: result, (), {}, form, made)
        if made:
            self.host.launch(self.card.current, info.name, run=fill, writes=fresh)
        return out

    def finish(self, op: Op, kind: str) -> None:
        """Make the host wait for an operation that it has just queued."""
        point = op.queue.point()
        self.host.wait(self.host.until([point], kind))

    def _copy(self, func: Any, call: _Call, args: Any, kwargs: Any) -> Any:
        """A copy between main memory and the card; None if it is one on the card."""
        target, source = (args[0], args[1]) if func is aten.copy_.default else (None, args[0])
        to, origin = None if target is None else self.blocks.find(target), self.blocks.find(source)
        goes_up = origin is None or origin.pinned
        comes_down = target is not None and (to is None or to.pinned)
        if not goes_up and not comes_down:
            return None
        free = kwargs.get("non_blocking") or (len(args) > 2 and bool(args[2]))
        if goes_up:
            if target is None:
                like = func(source, **{**kwargs, "device": torch.device("cpu")})
                target, to = self.card.make(New(tuple(like.shape), like.stride(), like.dtype), "upload")
            assert to is not None
            self.upload(target, to, source, origin, blocking=not free)
            return target
        assert origin is not None and target is not None
        self._download(target, to, source, origin, blocking=not (free and to is not None))
        return target

    def upload(self, target: torch.Tensor, to: Block, source: torch.Tensor, pinned: Block | None, *, blocking: bool) -> None:
        """Queue a copy to the card; the host waits unless the source is pinned and it may go on."""
        inner = to.tensor(_key(target))
        data = source.detach().clone() if pinned is None else pinned.tensor(_key(source))
        reads = [] if pinned is None else [pinned.memory]
        op = self.host.launch(self.card.current, "upload", run=lambda: inner.copy_(data), reads=reads, writes=[to.memory])
        if pinned is None:
            self.finish(op, "upload of memory that is not pinned")
        elif blocking:
            self.finish(op, "blocking upload")

    def _download(self, target: torch.Tensor, to: Block | None, source: torch.Tensor, origin: Block, *, blocking: bool) -> None:
        inner, data = target if to is None else to.tensor(_key(target)), origin.tensor(_key(source))
        writes = [] if to is None else [to.memory]
        op = self.host.launch(
            self.card.current, "copy to main memory", run=lambda: inner.copy_(data), reads=[origin.memory], writes=writes
        )
        if blocking:
            self.finish(op, "copy to main memory")


def _substituted(kwargs: dict[str, Any], values: dict[int, torch.Tensor]) -> dict[str, Any]:
    return {name: substitute(value, values) for name, value in kwargs.items()}


def _key(tensor: torch.Tensor) -> Key:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()  # pyright: ignore[reportReturnType]


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}


def _masked(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _run(func: Any, args: Any, kwargs: Any, form: Form, made: list[torch.Tensor]) -> Callable[[], object]:
    """A kernel: computes, and fills what the program holds already."""
    if not made:
        return lambda: func(*args, **kwargs)
    if isinstance(form, New):
        (only,) = made
        return lambda: only.copy_(func(*args, **kwargs))

    def run() -> None:
        found = iter(made)
        _fill(form, func(*args, **kwargs), found)

    return run


def _fill(form: Form, result: Any, made: Iterator[torch.Tensor]) -> None:
    if isinstance(form, New):
        next(made).copy_(result)
    elif isinstance(form, list | tuple):
        for one, value in zip(form, result, strict=True):
            _fill(one, value, made)


def _with_state(run: Callable[[], object], state: torch.Tensor, kwargs: Any) -> Callable[[], None]:
    """The same with the random numbers of the launch."""

    def drawn() -> None:
        generator = kwargs.get("generator") or torch.default_generator
        now = generator.get_state()
        generator.set_state(state)
        try:
            run()
        finally:
            generator.set_state(now)

    return drawn
