"""What users do, through `gpp.parallelize` with threads as workers, beside a plain loop: equal, refused, warned of, never silent.

`python -m tests.checks.idioms` runs the same cases with workers that are processes.
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
MORE = """
    bitfit peft old_weight_norm own_parametrization two_names functional complex_numbers ema stubborn
    buffer_copied passing_buffer functional_dropout enable_grad straight_through reentrant cast gru lstm cell
    encoder images operators compiled traced partial_loss positive_weights others outputs_alone fused foreach
    own_class zero_gradient without_gradient tied_by_property called by_name no_grad stopped plain_python
    attention sparse pruned orthogonal tensor_rate partial_class several_targets sync_norm renamed compares
    spectral_norm torch_Adadelta torch_Adamax torch_RAdam torch_Rprop torch_RMSprop torch_Adam torch_NAdam
    class_alone rate_by_hand one_cycle padding causal batch_norm_whole spectral_norm_whole depth_by_sample noise
    penalty masked odd cached_elsewhere counted_elsewhere momentum_encoder checked_values
"""
"""Those that tell little beside others, or take seconds."""
SHORT = [case for case in CASES if case.make.__name__ not in MORE.split()][::4]
SHORT = [case for case in SHORT if case.make.__name__ != "whole_transformer"]  # six seconds


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, of idioms that it has better ones for
        yield
    torch.set_num_threads(before)


def test_names_of_those_left_out_are_names() -> None:
    assert {case.make.__name__ for case in CASES} >= set(MORE.split())


@pytest.mark.parametrize(
    "case",
    [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES],
    ids=lambda case: case.make.__name__,
)
def test_an_idiom_is_equal_or_told(case: Idiom, tmp_path: Path) -> None:
    found = tried(case, tmp_path / "run", workers_in_threads)
    assert agrees(case, found), f"{case.name}: {found}"


def test_every_optimizer_of_torch_is_among_them() -> None:
    named = {cls.__name__ for cls in CLASSES} | {"LBFGS"}
    assert named == {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)} - {"Optimizer"}
    assert all(any(f"torch.optim.{name}`" in case.name for case in CASES) for name in named - {"LBFGS"})


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == written(page, CASES), "run python -m tests.checks.idioms --threads"
