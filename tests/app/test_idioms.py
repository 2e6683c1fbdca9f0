"""What users do, through `gpp.parallelize` with threads as workers, against a plain loop: equal, refused or warned of, never silent.

`python -m tests.check_idioms` runs the same cases with workers that are processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.idioms.case import Idiom, agrees, tried
from tests.idioms.optimizers import CLASSES
from tests.idioms.table import PAGE, idioms, written
from tests.support.threads import workers_in_threads

CASES = idioms()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, of idioms that it has better ones for
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_an_idiom_is_equal_or_told(case: Idiom, tmp_path: Path) -> None:
    found = tried(case, tmp_path / "run", workers_in_threads)
    assert agrees(case, found), f"{case.name}: {found}"


def test_every_optimizer_of_torch_is_among_them() -> None:
    named = {cls.__name__ for cls in CLASSES} | {"LBFGS"}
    assert named == {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert all(any(f"torch.optim.{name}`" in case.name for case in CASES) for name in named - {"LBFGS"})


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == written(page, CASES), "run python -m tests.check_idioms --threads"
