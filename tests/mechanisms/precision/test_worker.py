"""Passes and messages in bfloat16, of weights that keep their type."""

from pathlib import Path

import pytest
import torch

from gpp.errors import InvalidConfig
from gpp.runtime.engines.distributed import Distributed
from tests.runtime.test_options import trained


def test_autocast_computes_and_sends_in_bfloat16_and_keeps_weights(tmp_path: Path) -> None:
    plain, _, _ = trained(tmp_path / "plain", "float32")
    losses, state, workers = trained(tmp_path / "cast", "float32", autocast="bfloat16")
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.03)
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}
    sent = [spec for worker in workers for runner in worker.training.runners.values() for spec in runner._specs.values()]
    assert {spec.dtype for spec in sent if spec.dtype.is_floating_point} == {torch.bfloat16}


def test_unknown_types_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.autocast"):
        Distributed(autocast="int8")
