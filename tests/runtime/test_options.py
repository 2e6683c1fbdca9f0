"""A setting of the engine that changes how a stage computes: torch.compile."""

import random
from pathlib import Path

import pytest
import torch

from gpp import SGD, OneFOneB
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidConfig
from gpp.plan.build import make_plan
from gpp.runtime.engines.distributed import _check_backend
from tests.support import inprocess
from tests.support.problems import random_partition
from tests.support.small import Small


def trained(tmp_path: Path, dtype: str, **settings) -> tuple[list[float], dict[str, torch.Tensor], list]:
    """Branches on three devices, two steps; a small network, because compilers and bfloat16 on a processor take their time."""
    model = Small(kind="Fork")
    cap, weights = inprocess.capture(model, dtype)
    problem = inprocess.problem_of(cap, 3, 8)
    parts = [(mask, 1) for mask in random_partition(problem.graph, 3, random.Random(2))]
    plan = make_plan(problem, "test", parts, 4)
    data, optimizer = Synthetic(num_samples=16, num_test_samples=8), SGD(lr=0.05, momentum=0.9)
    own = {"model": model, "data": data, "optimizer": optimizer, "steps": 2, "dtype": dtype} | settings
    return inprocess.run(inprocess.make_job(cap, problem, plan, OneFOneB(), **own), tmp_path, weights)


def test_compiled_stages_train_alike(tmp_path: Path) -> None:
    plain, state, _ = trained(tmp_path / "plain", "float64")
    losses, compiled, workers = trained(tmp_path / "compiled", "float64", compile="aot_eager")
    assert losses == pytest.approx(plain, abs=1e-9)
    assert all(torch.allclose(state[name], compiled[name], rtol=0, atol=1e-9) for name in state)
    assert all(hasattr(module._run, "_torchdynamo_orig_callable") for worker in workers for module in worker.modules.values())


def test_unknown_compilers_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.compile=fast: .*inductor"):
        _check_backend("fast")
    _check_backend("aot_eager")
