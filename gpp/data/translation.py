"""A made-up language to translate into: every sequence reversed, every token exchanged for another."""

from __future__ import annotations

from typing import final

import numpy as np

from gpp.data.base import TARGET, AbstractData, Samples, check_split
from gpp.errors import InvalidConfig
from gpp.models.base import AbstractModel
from gpp.settings import Count, settings

START = 0  # the token before a target's first


@final
@settings("data")
class Translation(AbstractData):
    """Random `source` tokens; `target` is the reversed source with permuted tokens, `previous` the target one late.

    The model gives length and tokens; the token `START` begins `previous` and occurs nowhere else. The permutation is a
    function of the run's seed, and the same for both splits.

    Args:
        num_samples, num_test_samples: sizes of the two splits.
    """

    num_samples: Count = 16384
    num_test_samples: Count = 512

    def check(self, model: AbstractModel) -> None:
        inputs, targets = model.inputs(), model.targets()
        specs = [*inputs.values(), *targets.values()]
        first = specs[0]
        alike = first.dtype == "int" and len(first.shape) == 1 and all(spec == first for spec in specs)
        if set(inputs) != {"source", "previous"} or set(targets) != {"target"} or not alike:
            rule = (
                f"takes {', '.join(inputs)} and {', '.join(targets)}; data=translation has source, previous and target, all alike"
            )
            raise InvalidConfig("model", model.name, rule, "model=translator_small, or data=synthetic, which fits every model")
        if (first.high or 0) < 3:
            raise InvalidConfig("model.vocabulary", first.high, "must be at least 3: two tokens and the start", "vocabulary=24")

    def load(self, split: str, model: AbstractModel, *, seed: int, dtype: str) -> Samples:
        from gpp.data.samples import ColumnSamples

        check_split(split)
        self.check(model)
        spec = model.inputs()["source"]
        assert spec.high is not None  # every int has one
        exchanged = np.concatenate([[START], 1 + np.random.default_rng([seed, 0]).permutation(spec.high - 1)])
        rng = np.random.default_rng([seed, 1 if split == "train" else 2])
        source = rng.integers(1, spec.high, (self.num_samples if split == "train" else self.num_test_samples, *spec.shape))
        target = exchanged[source[:, ::-1]]
        columns = {"source": source, "previous": late(target), TARGET + "target": target}
        return ColumnSamples(len(source), {name: lambda column=column: column for name, column in columns.items()}, dtype)


def late(tokens: np.ndarray) -> np.ndarray:
    """[num_samples, L]: the tokens of each row that are known when its next token is predicted."""
    return np.concatenate([np.full_like(tokens[:, :1], START), tokens[:, :-1]], axis=1)
