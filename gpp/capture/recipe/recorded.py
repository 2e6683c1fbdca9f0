"""The recipe of a model's initial tensors (`gpp.capture.recipe.value`), from its constructor.

The constructor runs once, on fake tensors that have sizes and no storage, and every call of torch's is written down. Whoever needs
some of the tensors carries out the calls that those depend on (`gpp.capture.recipe.made`), with the same numbers as if all were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpp.capture.codec import default_dtype, encode, is_random, operator_of, stored_name
from gpp.capture.kept import advanced, random_states
from gpp.capture.recipe.made import kept_generator, made
from gpp.capture.recipe.value import COVERING, Recipe, Step, StorageView
from gpp.errors import GppError, InvalidConfig


class NotRecorded(GppError):
    """The initial tensors of a model are not made by calls that can be recorded; the message says why."""


class Recorded(NamedTuple):
    """A recipe, and the bytes of its `given` storages by number."""

    recipe: Recipe
    given: dict[int, Tensor]


def record(
    build: Callable[[], nn.Module], wanted: Callable[[nn.Module], Mapping[str, Tensor]], *, seed: int, dtype: str
) -> Recorded:
    """The recipe of the tensors of a model.

    Args:
        build: makes the model.
        wanted: of the model, the tensors by full name.

    Raises:
        NotRecorded: the constructor needs more than single numbers of its tensors, or draws elsewhere than from torch's generator.
    """
    states = random_states()
    recorder = _Calls(seed, dtype)
    with kept_generator():
        torch.manual_seed(seed)
        recorder.drawn()
        try:
            with default_dtype(dtype), FakeTensorMode(allow_non_fake_inputs=True), recorder:
                tensors = {name: recorder.view(tensor) for name, tensor in wanted(build()).items()}
        except (NotRecorded, InvalidConfig):
            raise
        except Exception as error:
            words = next(iter(str(error).strip().splitlines()), "")
            raise NotRecorded(f"its constructor fails on tensors without numbers ({type(error).__name__}: {words})") from error
        recorder.check_generator()
    if drew := advanced(states):
        words = "Python's module random" if drew[0] == "random" else "numpy.random"
        raise NotRecorded(f"its constructor draws from {words}, of which the seed says nothing")
    return Recorded(recorder.recipe(tensors), recorder.given)


@final
class _Calls(TorchDispatchMode):
    """Writes down what is called, with fake tensors beneath it."""

    def __init__(self, seed: int, dtype: str) -> None:
        super().__init__()
        self._seed, self._dtype = seed, dtype
        self.steps: list[Step] = []
        self.given: dict[int, Tensor] = {}
        self._number: dict[int, int] = {}
        self._alive: list[Any] = []

    def recipe(self, tensors: dict[str, StorageView]) -> Recipe:
        """The recipe of some tensors, by the calls so far."""
        return Recipe(seed=self._seed, dtype=self._dtype, steps=tuple(self.steps), tensors=tensors, given=tuple(self.given))

    def drawn(self) -> None:
        """Leave the generator, of which fake tensors take nothing, in a state that it can only have at this place."""
        torch.rand(1)
        self._state = torch.get_rng_state()

    def check_generator(self) -> None:
        """Refuse a generator in another state than the calls so far leave it in.

        Raises:
            NotRecorded
        """
        if not torch.equal(torch.get_rng_state(), self._state):
            raise NotRecorded("its constructor sets the state of torch's generator")

    def view(self, tensor: Tensor) -> StorageView:
        """A tensor as a part of its storage.

        Raises:
            NotRecorded: it is none, or that of a call that this was not told of.
        """
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotRecorded(f"its constructor makes a tensor of {tensor.layout} that is sparse, conjugated or negated lazily")
        storage = tensor.untyped_storage()
        number = self._number.get(storage._cdata)
        if number is None and isinstance(tensor, FakeTensor):
            raise NotRecorded("its constructor makes a tensor by other means than torch's operators")
        if number is None:
            number = self._new(storage)
            with _disable_current_modes():
                self.given[number] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()  # type: ignore[call-overload]
        return self._at(tensor, number)

    def _new(self, storage: Any) -> int:
        self._alive.append(storage)  # else another may get its address
        return self._number.setdefault(storage._cdata, len(self._alive) - 1)

    @staticmethod
    def _at(tensor: Tensor, storage: int) -> StorageView:
        kind = str(tensor.dtype).removeprefix("torch.")
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return StorageView(storage=storage, dtype=kind, shape=shape, stride=stride, offset=int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, torch.Generator) for value in pytree.tree_leaves((args, kwargs))):
            raise NotRecorded("its constructor draws from a generator of its own")
        name = stored_name(func)
        if name == "aten._local_scalar_dense.default":
            return self._read(args[0])
        if func._schema.name in ("aten::set_", "aten::resize_"):
            raise NotRecorded(f"its constructor calls {func._schema.name.removeprefix('aten::')}, which changes a tensor's storage")
        reads: list[StorageView] = []

        def reference(tensor: Tensor) -> dict[str, str]:
            reads.append(self.view(tensor))
            return {"ref": str(len(reads) - 1)}

        own, named = [encode(value, reference) for value in args], {key: encode(value, reference) for key, value in kwargs.items()}
        writes, draws = tuple(self._written(func, args, kwargs)), is_random(func, list(args), kwargs)
        if draws:
            with _disable_current_modes():
                self.check_generator()
                self.drawn()
        result = func(*args, **kwargs)
        makes = tuple(self._made(result))
        if writes or makes:
            operator_of(name)
            covers = name in COVERING and args[0].is_contiguous()
            covers = covers and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes()
            kinds = {"writes": writes, "covers": covers, "makes": makes, "draws": draws}
            self.steps.append(Step(target=name, args=own, kwargs=named, reads=tuple(reads), **kinds))
        return result

    def _made(self, result: Any) -> Iterator[tuple[int, StorageView]]:
        for place, tensor in enumerate(pytree.tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._number:
                yield place, self._at(tensor, self._new(tensor.untyped_storage()))

    def _written(self, func: Any, args: Any, kwargs: Any) -> Iterator[int]:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from (self.view(tensor).storage for tensor in pytree.tree_leaves(value) if isinstance(tensor, Tensor))

    def _read(self, tensor: Tensor) -> Any:
        """The number in a tensor of one element, as the calls so far make it: rates of layers, bounds of a distribution."""
        recipe = self.recipe({"": self.view(tensor)})
        with _disable_current_modes():
            return next(made(recipe, {""}, self.given.__getitem__))[1].item()
