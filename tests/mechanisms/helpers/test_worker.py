"""What a helper holds. Its numbers are those of a whole backward: `tests/mechanisms/weight_versions/test_async_equality.py`."""

import torch

from gpp import SGD, Stash
from gpp.mechanisms.helpers.operands import operands_of_stage
from gpp.mechanisms.helpers.worker import WORKER
from gpp.runtime.worker.hooks import OwnDevice
from tests.support.asynchronous import make_job
from tests.support.fake_transport import FakeNetwork, FakeTransport


def test_a_helper_holds_no_weights_and_makes_all_that_it_is_there_for() -> None:
    """Else equality would say little: nothing of a linear layer is left to the stage's own device."""
    devices, helpers = (0, 1, 1, 2), (1, 3, 0, None)
    job, _ = make_job("Chain4", Stash(), SGD(lr=0.1, momentum=0.9), sizes=2, devices=devices, helpers=helpers)
    own = OwnDevice(
        job=job,
        device_id=3,
        device=torch.device("cpu"),
        modules={},
        params={},
        transport=FakeTransport(FakeNetwork((), 4), 3),
        handover={},
        card=None,
    )
    (helper,) = WORKER.build(own).helpers.values()
    names = {name for op in job.plan.stages[1].ops for name in job.graph.trained_by[op]}
    assert set(helper.params) == names == {name for each in operands_of_stage(job, 1) for name in each.params}
    assert all(param.untyped_storage().nbytes() == 8 for param in helper.params.values())
