"""What other pipeline systems get wrong, and ours must not; each test names the bug that it excludes.

Found in torch.distributed.pipelining 2.13 and DeepSpeed 0.19.8 by running them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpp.capture.examples import default_dtype
from gpp.capture.stage import initial_state
from gpp.data.sampler import minibatch
from gpp.data.synthetic import Synthetic
from gpp.models.losses import loss, loss_terms
from gpp.optimizers import SGD
from gpp.plan.build import make_plan
from gpp.plan.plan import Plan
from gpp.runtime.job import Job
from gpp.schedules.base import AbstractSchedule
from gpp.schedules.gpipe import GPipe
from gpp.schedules.one_f_one_b import OneFOneB
from tests.support import inprocess
from tests.support.conf import option
from tests.support.small import Small
from tests.support.staged import SCHEDULES, captured, parts_of, problem_of

DATA = Synthetic(num_samples=48, num_test_samples=21)
SGD_ = SGD(lr=0.2, momentum=0.9)


def job_of(
    network: str,
    schedule: AbstractSchedule | None = None,
    *,
    size: int = 4,
    k: int = 1,
    order: tuple[int, ...] | None = None,
    steps: int = 2,
    optimizer: SGD = SGD_,
    held_out: int = 0,
) -> tuple[Small, dict[str, Tensor], Job, Plan]:
    """A job with a device for each submodule; `order`: how the stages are numbered."""
    model, found, weights = captured(network)
    schedule = schedule or OneFOneB()
    masks = parts_of(found.graph)
    problem = problem_of(found, schedule, len(masks))
    parts = [(masks[s], 1) for s in order or range(len(masks))]
    plan = make_plan(problem, "test", parts, size, k=k, ordered=True)
    job = inprocess.make_job(
        found, problem, plan, schedule, model=model, data=DATA, optimizer=optimizer, steps=steps, dtype="float64", held_out=held_out
    )
    return model, weights, job, plan


def check_training(model: Small, weights: dict[str, Tensor], job: Job, run_dir: Path, optimizer: SGD = SGD_) -> None:
    losses, state, _ = inprocess.run(job, run_dir, weights)
    expected, params = inprocess.reference(
        model, DATA, optimizer, weights, steps=job.settings.steps, minibatch_size=16, dtype="float64"
    )
    assert losses == pytest.approx(expected, abs=1e-9)
    for name, tensor in params.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-8)


def evaluated(model: Small, state: dict[str, Tensor]) -> float:
    """The loss, its terms summed, of the network in evaluation mode on all held-out samples."""
    network = model.build().double().eval()
    network.load_state_dict(state)
    samples = DATA.load("test", model, seed=0, dtype="float64").fetch(list(range(DATA.num_test_samples)))
    with torch.no_grad():
        terms = loss_terms(loss(model.loss)(network(x=samples["x"]), samples["target:y"]))
    return float(sum(terms.values()))


@pytest.mark.parametrize(
    ("network", "edge"),
    [
        ("Skip", (0, 3)),  # an edge between stages that are no neighbours raises
        ("Fork", (0, 2)),  # the backward of a forked output raises
    ],
)
def test_skip_edges_and_forks_train(network: str, edge: tuple[int, int], tmp_path: Path) -> None:
    model, weights, job, plan = job_of(network)
    assert edge in plan.edges
    check_training(model, weights, job, tmp_path)


def test_a_second_input_at_a_later_stage_trains(tmp_path: Path) -> None:
    """Bug: "expected non-root _RecvInfo but got root arg" for a model input that a later stage reads."""
    model, weights, job, _ = job_of("TwoSources")
    job.save(tmp_path, weights)
    readers = [set(worker.modules[s].inputs) for s, worker in enumerate(inprocess.workers_of(job, tmp_path))]
    assert readers == [{"x"}, {"other"}, {"late", "target:y"}]
    check_training(model, weights, job, tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_forward_only_keeps_the_branches_apart(order: tuple[int, ...], tmp_path: Path) -> None:
    """Bug: stages numbered by one order and modules fetched by another, so that two branches are swapped without an error."""
    model, weights, job, _ = job_of("Fork", order=order, held_out=21)
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    found = sum(share.get("loss", 0.0) for share in inprocess.in_threads([w.evaluate for w in workers]))
    assert found == pytest.approx(evaluated(model, weights), abs=1e-12)
    swapped = {**weights, **{f"s1.0.{n}": weights[f"s2.1.{n}"] for n in ("weight", "bias")}}
    swapped |= {f"s2.1.{n}": weights[f"s1.0.{n}"] for n in ("weight", "bias")}
    assert abs(evaluated(model, swapped) - found) > 1e-3


def test_nothing_runs_on_uninitialised_memory(tmp_path: Path) -> None:
    """Bug: shapes inferred by running the module on empty tensors, which ruins the running statistics of every later stage."""
    model, weights, job, _ = job_of("NormedBatch", steps=2)
    with default_dtype("float64"):
        network = model.build()
    network.load_state_dict(weights)
    fresh = initial_state(network, job.captured)
    job.save(tmp_path, weights)
    for worker in inprocess.workers_of(job, tmp_path):
        for module in worker.modules.values():
            for name, buffer in module.named_buffers():
                torch.testing.assert_close(buffer, fresh[name], rtol=0, atol=0)
    _, state, _ = inprocess.run(job, tmp_path, weights)
    optimizer, samples = SGD_.build(network.parameters()), DATA.load("train", model, seed=0, dtype="float64")
    for step in range(2):
        values = samples.fetch(minibatch(step, 16, len(samples), 0))
        for lo in range(0, 16, 4):
            part = {name: tensor[lo : lo + 4] for name, tensor in values.items()}
            (torch.nn.functional.mse_loss(network(x=part["x"]), part["target:y"]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for s in range(2):
        assert int(state[f"s{s}.1.num_batches_tracked"]) == 8
        for name in ("running_mean", "running_var", "weight"):
            torch.testing.assert_close(state[f"s{s}.1.{name}"], network.state_dict()[f"s{s}.1.{name}"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("network", ["Dropping", "NormedBatch", "TwoSinks"])
def test_evaluation_works_under_every_schedule_and_leaves_no_trace(network: str, schedule: str, tmp_path: Path) -> None:
    """Bug: `eval()` plays backwards and crashes, keeps autograd and dropout on, or moves running statistics."""
    order, k = SCHEDULES[schedule]
    model, weights, job, _ = job_of(network, order, k=k, steps=1, held_out=21)
    _, state, workers = inprocess.run(job, tmp_path / "trained", weights)
    before = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(2):
        shares = inprocess.in_threads([w.evaluate for w in workers])
        total = sum(value for share in shares for name, value in share.items() if name.startswith("loss"))
        assert total == pytest.approx(evaluated(model, state), abs=1e-12)
    for worker in workers:
        assert not {event.kind for event in worker.evaluation.take()[0]} & {"B", "SB", "R", "U"}
        assert not any(runner.results for runner in worker.evaluation.runners.values())
        assert all(p.grad is None or not p.grad.any() for p in worker.params.values())
        for module in worker.modules.values():
            for name, tensor in module.state_dict().items():
                torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_no_gradients_are_clipped_unless_asked(name: str, tmp_path: Path) -> None:
    """Bug: clipping to norm 1 became the default, and weights differed by 0.08."""
    assert option("optimizer", name).clip_norm is None
    large = SGD(lr=1e-3, momentum=0.9)
    model, weights, job, _ = job_of("Chain", optimizer=large, steps=1)
    weights = {key: 20.0 * tensor if key.endswith("s2.0.weight") else tensor for key, tensor in weights.items()}
    with inprocess.recorded_gradients() as gradients:
        _, state, workers = inprocess.run(job, tmp_path, weights)
        _, params = inprocess.reference(model, DATA, large, weights, steps=1, minibatch_size=16, dtype="float64")
        inprocess.check_gradients(workers, params, gradients, steps=1)
        assert sum(float(gradients(p)[0].square().sum()) for p in params.values()) > 1.0
    for key, tensor in params.items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=lambda s: type(s).__name__)
def test_the_backward_of_a_shared_past_runs_once(schedule: AbstractSchedule, tmp_path: Path) -> None:
    """Bug: one backward for each tensor that a stage sends, so that three outputs cost three backwards of what they share."""
    _, weights, job, plan = job_of("ThreeOutputs", schedule, steps=1)
    assert {t for s, t in plan.edges if s == 0} == {1, 2, 3}
    job.save(tmp_path, weights)
    workers = inprocess.workers_of(job, tmp_path)
    count: dict[str, int] = {}

    def counted(name: str):
        def note(param: Tensor) -> None:
            count[name] = count.get(name, 0) + 1

        return note

    for name, param in workers[0].params.items():
        param.register_post_accumulate_grad_hook(counted(name))
    inprocess.in_threads([lambda w=w: w.train(0, 1, lambda record: None) for w in workers])
    assert count == dict.fromkeys(workers[0].params, 4)  # once for each of four micro-batches


def test_tied_weights_of_two_stages_stay_tied(tmp_path: Path) -> None:
    """Bug: a parameter that two stages use is copied, and nothing keeps the copies equal."""
    model, weights, job, _ = job_of("Tied", steps=3)
    _, _, workers = inprocess.run(job, tmp_path, weights)
    holders = [worker.params["s0.weight"] for worker in workers if "s0.weight" in worker.params]
    assert len(holders) == 2
    torch.testing.assert_close(holders[0], holders[1], rtol=0, atol=0)
    assert (holders[0] - weights["s0.weight"]).abs().max() > 1e-4
    check_training(model, weights, job, tmp_path / "again")
