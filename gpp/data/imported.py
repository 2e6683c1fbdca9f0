"""A data set of the user's own, or of any library, named by the dotted path of its factory."""

from __future__ import annotations

from typing import Any, final

from gpp.data.base import AbstractData, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel
from gpp.models.dotted import check_dotted, origin, resolve
from gpp.settings import settings


@final
@settings("data")
class Imported(AbstractData):
    """`factory(**args, **train_args)` for training, `factory(**args, **test_args)` for testing.

    The factory returns a map-style torch Dataset whose items are `(inputs, targets)` or one dict of both.
    Each of `inputs` and `targets` is a dict by the model's names, a tuple in the model's order, or, when there
    is only one, the value itself.

    Args:
        factory: dotted path of a class or function.
        args, train_args, test_args: keyword arguments of the factory; null for none.
    """

    factory: str
    args: dict[str, Any] | None = None
    train_args: dict[str, Any] | None = None
    test_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_dotted(self.factory, field="data.factory")
        for name in ("train_args", "test_args"):
            twice = sorted(set(self.args or {}) & set(getattr(self, name) or {}))
            if twice:
                raise InvalidConfig(f"data.{name}", twice, "are in data.args, too", "give each argument once")

    def check(self, model: AbstractModel) -> None:
        origin(self.factory, field="data.factory")

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.items import Items

        check_split(split)
        extra = self.train_args if split == "train" else self.test_args
        dataset = resolve(self.factory, field="data.factory")(**(self.args or {}), **(extra or {}))
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise InvalidConfig("data.factory", self.factory, "must return a map-style Dataset", "give it __len__ and __getitem__")
        return Items(dataset, model, dtype)
