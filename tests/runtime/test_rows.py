"""A replica fetches the rows of its own samples, those of other pieces where they are asked for, and nothing else."""

from collections.abc import Collection, Sequence

import pytest
import torch

from gpp.data.base import Samples
from gpp.runtime.worker.rows import Pieces, Rows


class Noted(Samples):
    in_memory = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 40

    def fetch(self, indices: Sequence[int] | torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        found = torch.as_tensor(indices)
        self.asked += found.tolist()
        return {"x": found * 10}


@pytest.mark.parametrize("pieces", [((0, 2), (4, 6)), ((2, 4), (6, 8)), ((0, 4),), None])
def test_a_replica_fetches_its_own_samples(pieces: Pieces | None) -> None:
    rows, samples = Rows.__new__(Rows), Noted()
    by_split: dict[str, Samples] = {"train": samples}
    rows._device, rows._card, rows._samples = torch.device("cpu"), None, by_split
    rows._next, rows._prepared = {}, {}
    rows.loading = torch.no_grad

    def order(number: int) -> torch.Tensor:
        return torch.arange(8).flip(0) + 8 * number

    fetch = rows.fetch("train", 8, order, ("x",), pieces)
    samples.asked.clear()
    for number in range(3):
        for lo, hi in pieces or ((0, 3), (3, 8)):
            found = fetch(8 * number + lo, 8 * number + hi)["x"]
            assert found.tolist() == (order(number)[lo:hi] * 10).tolist()
        rows.ahead()
    own = [int(order(number)[at]) for number in range(4) for lo, hi in pieces or ((0, 8),) for at in range(lo, hi)]
    assert samples.asked == own, "and those of the mini-batch ahead"
    assert fetch(1, 7)["x"].tolist() == (order(0)[1:7] * 10).tolist()
