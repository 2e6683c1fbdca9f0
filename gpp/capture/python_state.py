"""The state in Python that a model's code reaches: its tensors, and what objects, containers and variables hold.

A forward may count in an object that it has, keep tensors in a dictionary of its file, or draw by a generator of its own. A trace
follows none of this; what it leaves there (tensors without values) would break the model.
"""

from __future__ import annotations

import copy
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpp.capture.user_lines import is_users

CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
PLAIN = (int, float, complex, bool, str, bytes, type(None))
_TORCHS = frozenset(vars(nn.Module()))
"""Attributes that every module has of torch: parameters, buffers, hooks, the mode."""

_MEMBERS = ("_modules", "_parameters", "_buffers")

MOST = 20_000
"""Most objects that are looked at: a model that holds a whole data set is not searched to its end."""


class Missing:
    """Stands for a value that was not there."""


class HeldPlace(Protocol):
    """Something that holds values by name, as it was when it was found."""

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """What is another now: (path, value before, value after)."""
        ...

    def put_back(self) -> None:
        """Undo all that has changed."""


class Names:
    """A mapping: the attributes of an object, a dictionary, or some variables of a file.

    Args:
        names: the only ones that count; None for all.
        told: whether a change of a name is one for the user, and not torch's own.
    """

    def __init__(
        self,
        held: Any,
        path: Callable[[Any], str],
        names: Iterable[str] | None = None,
        told: Callable[[Any], bool] = lambda name: True,
    ) -> None:
        self._held, self._path, self._told = held, path, told
        self._names = None if names is None else tuple(names)
        self._kept = self._now()

    def _now(self) -> dict[Any, Any]:
        if self._names is not None:
            return {name: self._held[name] for name in self._names if name in self._held}
        return dict(self._held)

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        now = self._now()
        if now.keys() == self._kept.keys() and all(map(operator.is_, map(now.get, self._kept), self._kept.values())):
            return  # nearly always, before every step
        for name in dict.fromkeys((*self._kept, *now)):
            before, after = self._kept.get(name, Missing), now.get(name, Missing)
            if self._told(name) and not same(before, after):
                yield self._path(name), before, after

    def put_back(self) -> None:
        now = self._now()
        for name in now.keys() - self._kept.keys():
            del self._held[name]
        for name, value in self._kept.items():
            if now.get(name, Missing) is not value:
                self._held[name] = value


class Value:
    """One value that is read and written by functions.

    Args:
        write: None where it cannot be put back.
    """

    def __init__(self, path: str, read: Callable[[], Any], write: Callable[[Any], None] | None = None) -> None:
        self._path, self._read, self._write, self._kept = path, read, write, read()

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        now = self._read()
        if not same(self._kept, now):
            yield self._path, self._kept, now

    def put_back(self) -> None:
        if self._write and not same(self._kept, self._read()):
            self._write(self._kept)


def items(held: Any, path: str) -> Value:
    """A list, a queue or a set."""

    def write(kept: Any) -> None:
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(kept)

    return Value(path, held.copy, write)


class Cache:
    """`functools.lru_cache` of a function: it is emptied, and no change, since it decides nothing."""

    def __init__(self, held: Any) -> None:
        self._held, self._misses = held, held.cache_info().misses

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        return iter(())

    def put_back(self) -> None:
        if self._held.cache_info().misses != self._misses:
            self._held.cache_clear()
            self._misses = 0


class Generator(Value):
    """A random generator of the user's own."""

    def __init__(self, held: Any, path: str) -> None:
        read, write, self.reseed = _generator(held)
        super().__init__(path, read, write)


def _generator(held: Any) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]:
    """How the state of a generator is read, written and begun anew."""
    if isinstance(held, random.Random):
        return held.getstate, held.setstate, held.seed
    if isinstance(held, torch.Generator):
        return held.get_state, held.set_state, held.manual_seed
    bits: Any = held._bit_generator if hasattr(held, "_bit_generator") else held.bit_generator

    def write(state: Any) -> None:
        bits.state = state

    return lambda: copy.deepcopy(bits.state), write, lambda seed: write(type(bits)(seed).state)


class PythonState:
    """All of it that can be reached from some objects: through attributes, containers, functions and the names in their code.

    Attributes:
        places: what holds values of the user's.
        members: the submodules, parameters and buffers of modules.
        tensors: those that were reached: `id` -> (path, tensor).
        registered: `id` of parameters and buffers.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.places: list[HeldPlace] = []
        self.members: list[HeldPlace] = []
        self._torchs: list[HeldPlace] = []
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.registered: set[int] = set()
        self._seen: dict[int, Any] = {}
        self._todo: deque[tuple[str, Any, bool]] = deque((path, value, False) for path, value in roots.items())
        self._far = False
        while self._todo and len(self._seen) < MOST:
            path, value, self._far = self._todo.popleft()
            self._look(path, value)

    def put_back(self) -> None:
        """Undo all that has changed."""
        for place in (*self.places, *self.members, *self._torchs):
            place.put_back()

    def _reach(self, path: str, value: Any, *, far: bool = False) -> None:
        """Queue a value to be looked at.

        Args:
            far: whether it is a variable of an installed package, whose further code is not followed.
        """
        if not isinstance(value, PLAIN):
            self._todo.append((path, value, far or self._far))

    def _look(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors[id(value)] = path, value
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, dict):
            if type(value) in CONTAINERS:
                self.places.append(Names(value, lambda key: f"{path}[{key!r}]"))
            for key, inner in value.items():
                self._reach(f"{path}[{key!r}]", inner)
        elif isinstance(value, list | tuple | set | deque):
            if type(value) in CONTAINERS:
                self.places.append(items(value, path))
            for number, inner in enumerate(value):
                self._reach(f"{path}[{number}]", inner)
        elif isinstance(value, types.FunctionType | type) and self._far:
            return
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._reach(path, value.__self__)
            self._reach(path, value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._reach(path, part)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.places.append(Cache(value))
            self._reach(path, value.__wrapped__)
        elif isinstance(value, type):
            self._class(value)
        elif type(value).__name__ == "ndarray":
            self.places.append(Value(path, value.copy, functools.partial(value.__setitem__, ...)))
        elif _is_generator(value):
            self.places.append(Generator(value, path))
        elif isinstance(value, types.GeneratorType):
            self.places.append(Value(path, lambda: value.gi_frame and value.gi_frame.f_lasti))
        elif type(value).__module__ in ("itertools", "builtins") and hasattr(value, "__next__"):
            self.places.append(Value(path, lambda: repr(value.__reduce__())))
        elif hasattr(value, "__dict__") and (_is_own(type(value)) or isinstance(value, types.SimpleNamespace)):
            self.places.append(Names(vars(value), lambda name: f"{path}.{name}"))
            for name, inner in vars(value).items():
                self._reach(f"{path}.{name}", inner)
            if not _is_installed(type(value).__module__):
                self._reach(path, type(value))

    def _module(self, path: str, module: nn.Module) -> None:
        held, dot = vars(module), f"{path}." if path else ""
        self.places.append(Names(held, lambda name: f"{dot}{name}", told=lambda name: name not in _TORCHS))
        for name, value in held.items():
            if name not in _TORCHS:
                self._reach(f"{dot}{name}", value)
            elif isinstance(value, dict | set):
                # Modules and tensors, by their own names; hooks.
                place: HeldPlace = items(value, path) if isinstance(value, set) else Names(value, lambda key: f"{dot}{key}")
                (self.members if name in _MEMBERS else self._torchs).append(place)
                if isinstance(value, dict) and name in ("_parameters", "_buffers"):
                    self.registered.update(map(id, value.values()))
                for inner, one in value.items() if isinstance(value, dict) else ():
                    self._reach(f"a hook of {path or 'the model'}" if "hook" in name else f"{dot}{inner}", one)
        self._reach(path, type(module))

    def _class(self, cls: type) -> None:
        """A class of the user's: its attributes, and what its functions reach."""
        if not _is_own(cls):
            return
        own = _Attributes(cls)
        self.places.append(Names(own, lambda name: f"{cls.__name__}.{name}"))
        for name in own.keys():  # noqa: SIM118  # it is no dictionary
            self._reach(f"{cls.__name__}.{name}", own[name])
        for name, value in vars(cls).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(function, types.FunctionType | functools._lru_cache_wrapper):
                self._reach(f"{cls.__name__}.{name}", function)
        for base in cls.__bases__:
            self._reach(base.__name__, base)

    def _function(self, function: types.FunctionType) -> None:
        """The variables around a function, its defaults, and of the user's own those of its file that its code names."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents", Missing)
            self.places.append(Value(f"the variable {name}", read, functools.partial(setattr, cell, "cell_contents")))
            self._reach(f"the variable {name}", read())
        for value in (function.__defaults__, function.__kwdefaults__, vars(function).get("__wrapped__")):
            self._reach(f"a default of {function.__name__}", value)
        if not is_users(function.__code__.co_filename):
            return
        far = _is_installed(function.__module__)
        file, named = function.__globals__, _names(function.__code__)
        found = [name for name in named if not isinstance(file.get(name), types.ModuleType)]
        self.places.append(Names(file, lambda name: f"the variable {name} of {function.__module__}", found))
        for name in found:
            self._reach(f"the variable {name} of {function.__module__}", file.get(name), far=far)
        for module in (file[name] for name in named if isinstance(file.get(name), types.ModuleType)):
            if is_users(getattr(module, "__file__", None) or "<"):
                for name in named & vars(module).keys():
                    self._reach(f"the variable {name} of {module.__name__}", vars(module)[name], far=far)


class _Attributes:
    """The data that a class holds, as a mapping."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def keys(self) -> list[str]:
        """Names of what is no function."""
        return [
            name
            for name, value in vars(self._cls).items()
            if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
        ]

    def __getitem__(self, name: str) -> Any:
        return vars(self._cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)


def _names(code: types.CodeType) -> set[str]:
    """The names in a function's code, and in that of functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_own(cls: type) -> bool:
    """Whether a class is neither torch's, nor Python's, nor of this room."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and is_users(file))


def _is_installed(module: str | None) -> bool:
    """Whether a file came with a package."""
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)


def same(before: Any, after: Any) -> bool:
    """Whether two values are one object, equal plain values, or containers of such."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, PLAIN):
        return before == after
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(same(value, after[key]) for key, value in before.items())
    if isinstance(before, list | tuple | deque):
        return len(before) == len(after) and all(map(same, before, after))
    if type(before).__name__ == "ndarray":
        return before.shape == after.shape and bool((before == after).all())
    if isinstance(before, Tensor):
        return before.dtype == torch.uint8 and torch.equal(before, after)  # the state of a generator
    return before == after if isinstance(before, set | torch.Size | torch.dtype | torch.device) else False
