import pytest
import torch

from gpp.capture.build import capture
from tests.support.capture_zoo import CASES
from tests.support.cutting import assert_cuts_exactly
from tests.support.long import thinned


@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_random_cuts_equal_the_model(name):
    """Loss, gradients, buffers; `normed` draws dropout too, in the order of execution, since it is a chain."""
    torch.manual_seed(0)
    kind, make, loss, metrics = CASES[name]
    model = kind().double()
    captured = capture(model, *make(3), loss, metrics, name=name)
    assert captured.batch is None
    assert not captured.warnings or "draws random numbers" in captured.warnings[0]
    # batch statistics need two samples
    assert_cuts_exactly(captured, model, make, loss, batches=(2, 5) if name == "normed" else (1, 2, 5))
