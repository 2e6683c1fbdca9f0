"""What other pipeline systems get wrong, and ours must not; each test names the bug that it excludes.

Found in torch.distributed.pipelining 2.13 and DeepSpeed 0.19.8 by running them. Edges between stages that are no neighbours, forked
outputs and inputs of later stages, which raise there, are among the cases of `test_equality.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpp import SGD, GPipe, OneFOneB
from gpp.capture.examples import default_dtype
from gpp.capture.stage import initial_state
from gpp.data.sampler import minibatch
from gpp.data.synthetic import Synthetic
from gpp.runtime.job import restore
from gpp.schedules.base import AbstractSchedule
from tests.support import inprocess, staged
from tests.support.conf import option
from tests.support.long import thinned
from tests.support.one_device import equals_one_device
from tests.support.training import held_out_loss

DATA = Synthetic(num_samples=48, num_test_samples=21)
SGD_ = SGD(lr=0.2, momentum=0.9)
job_of = partial(staged.job_of, data=DATA, optimizer=SGD_)


def evaluated(job: Any, state: dict[str, Tensor]) -> float:
    """The loss, its terms summed, of the network in evaluation mode on all held-out samples."""
    return held_out_loss(restore(job.settings.model), DATA, state, range(DATA.num_test_samples))


def test_a_second_input_at_a_later_stage_is_read_there(tmp_path: Path) -> None:
    """Bug: "expected non-root _RecvInfo but got root arg" for a model input that a later stage reads."""
    job, weights = job_of("TwoSources", OneFOneB())
    job.save(tmp_path, weights)
    readers = [set(worker.modules[s].inputs) for s, worker in enumerate(inprocess.workers_of(job, tmp_path))]
    assert readers == [{"x"}, {"other"}, {"late", "target:y"}]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_forward_only_keeps_the_branches_apart(order: tuple[int, ...], tmp_path: Path) -> None:
    """Bug: stages numbered by one order and modules fetched by another, so that two branches are swapped without an error."""
    job, weights = job_of("Fork", OneFOneB(), order=order, settings={"held_out": 21})
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    found = sum(share.get("loss", 0.0) for share in inprocess.in_threads([w.evaluate for w in workers]))
    assert found == pytest.approx(evaluated(job, weights), abs=1e-12)
    swapped = {**weights, **{f"s1.0.{n}": weights[f"s2.1.{n}"] for n in ("weight", "bias")}}
    swapped |= {f"s2.1.{n}": weights[f"s1.0.{n}"] for n in ("weight", "bias")}
    assert abs(evaluated(job, swapped) - found) > 1e-3


def test_nothing_runs_on_uninitialised_memory(tmp_path: Path) -> None:
    """Bug: shapes inferred by running the module on empty tensors, which ruins the running statistics of every later stage."""
    job, weights = job_of("NormedBatch", OneFOneB())
    model = restore(job.settings.model)
    with default_dtype("float64"):
        network = model.build()
    network.load_state_dict(weights)
    fresh = initial_state(network, job.captured)
    job.save(tmp_path, weights)
    for worker in inprocess.workers_of(job, tmp_path):
        for module in worker.modules.values():
            assert all(torch.equal(buffer, fresh[name]) for name, buffer in module.named_buffers())
    _, state, _ = inprocess.run(job, tmp_path, weights)
    optimizer, samples = SGD_.build(network.parameters()), DATA.load("train", model, seed=0, dtype="float64")
    for step in range(2):
        values = samples.fetch(minibatch(step, 16, len(samples), 0))
        for x, y in zip(values["x"].split(4), values["target:y"].split(4), strict=True):
            (torch.nn.functional.mse_loss(network(x=x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for s in range(2):
        assert int(state[f"s{s}.1.num_batches_tracked"]) == 8
        for name in ("running_mean", "running_var", "weight"):
            torch.testing.assert_close(state[f"s{s}.1.{name}"], network.state_dict()[f"s{s}.1.{name}"], rtol=0, atol=1e-9)


NETWORKS = ["Dropping", "NormedBatch", "TwoSinks"]


@pytest.mark.parametrize(
    ("network", "schedule"),
    thinned([(name, [*staged.SCHEDULES][(turn + more) % 3]) for turn, name in enumerate(NETWORKS) for more in range(3)], 3),
)
def test_evaluation_works_under_every_schedule_and_leaves_no_trace(network: str, schedule: str, tmp_path: Path) -> None:
    """Bug: `eval()` plays backwards and crashes, keeps autograd and dropout on, or moves running statistics."""
    order, k = staged.SCHEDULES[schedule]
    job, weights = job_of(network, order, k=k, steps=1, settings={"held_out": 21})
    _, state, workers = inprocess.run(job, tmp_path / "trained", weights)
    before = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        shares = inprocess.in_threads([w.evaluate for w in workers])
        total = sum(value for share in shares for name, value in share.items() if name.startswith("loss"))
        assert total == pytest.approx(evaluated(job, state), abs=1e-12)
    for worker in workers:
        assert not {event.kind for event in worker.evaluation.take()[0]} & {"B", "SB", "R", "U"}
        assert not any(runner.results for runner in worker.evaluation.runners.values())
        assert all(p.grad is None or not p.grad.any() for p in worker.params.values())
        for module in worker.modules.values():
            assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_no_gradients_are_clipped_unless_asked(tmp_path: Path) -> None:
    """Bug: clipping to norm 1 became the default, and weights differed by 0.08."""
    assert {option("optimizer", name).clip_norm for name in ("sgd", "adam", "adamw", "rmsprop")} == {None}
    job, weights = job_of("Chain", OneFOneB(), optimizer=SGD(lr=1e-3, momentum=0.9), steps=1)
    weights = {key: 20.0 * tensor if key.endswith("s2.0.weight") else tensor for key, tensor in weights.items()}
    with inprocess.recorded_gradients() as gradients:
        _, _, workers = equals_one_device(job, weights, tmp_path, within=(1e-9, 1e-10), gradients_within=1e-8)
        assert sum(float(gradients(p)[0].square().sum()) for worker in workers for p in worker.params.values()) > 1.0


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=lambda s: type(s).__name__)
def test_the_backward_of_a_shared_past_runs_once(schedule: AbstractSchedule, tmp_path: Path) -> None:
    """Bug: one backward for each tensor that a stage sends, so that three outputs cost three backwards of what they share."""
    job, weights = job_of("ThreeOutputs", schedule, steps=1)
    assert {t for s, t in job.plan.edges if s == 0} == {1, 2, 3}
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    made: list[str] = []
    for name, param in workers[0].params.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: made.append(name))
    inprocess.in_threads([lambda w=w: w.train(0, 1, lambda record: None) for w in workers])
    assert sorted(made) == sorted([*workers[0].params] * 4)  # once for each of four micro-batches


def test_tied_weights_of_two_stages_stay_tied(tmp_path: Path) -> None:
    """Bug: a parameter that two stages use is copied, and nothing keeps the copies equal."""
    job, weights = job_of("Tied", OneFOneB(), steps=3)
    _, _, workers = equals_one_device(job, weights, tmp_path)
    holders = [worker.params["s0.weight"] for worker in workers if "s0.weight" in worker.params]
    assert len(holders) == 2 and torch.equal(*holders)
    assert (holders[0] - weights["s0.weight"]).abs().max() > 1e-4
