"""What must hold of asynchronous training whoever computes it, shown on the loop that follows a pipeline in one process.

`test_async_equality.py` shows that real processes compute the same.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from baselines.reference import worker as reference_worker
from baselines.reference.pipeline import Pipeline, run_reference
from baselines.reference.reference import Reference
from gpp import DoubleBuffer, Naive, PipeOptim, SpecTrain, Stash, VerticalSync
from gpp.data.sampler import minibatch
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.mechanisms.round_robin.stage import IN_TURN
from gpp.optimizers import SGD, AbstractOptimizer, Adam
from gpp.runtime.checkpoint.final import finish_final, load_final
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.asynchronous import DATA, MINIBATCH, POLICIES, STEPS, make_job
from tests.support.cli import run
from tests.support.staged import captured

DEPTH = 4
SGDM = SGD(lr=0.1, momentum=0.9)
ADAMW = Adam(lr=0.01, weight_decay=0.1, decoupled=True)
FEW = ("naive", "stash", "vertical sync", "double buffer", "spectrain 1", "spectrain 2", "pipeoptim")


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step."""
    model, _, _ = captured("Chain4")
    samples = DATA.load("train", model, seed=0, dtype="float64")
    rows = [samples.fetch(minibatch(step, MINIBATCH, len(samples), 0)) for step in range(STEPS)]
    return [(row["x"], row["target:y"]) for row in rows]


def network_of(weights: dict[str, Tensor]) -> nn.Module:
    model, _, _ = captured("Chain4")
    network = model.build().double()
    network.load_state_dict(weights)
    return network


STASHED: dict[str, tuple[AbstractWeights, int, Callable[[int, int], int]]] = {
    "stash": (Stash(), 1, lambda k, i: max(0, i - (DEPTH - 1 - k))),
    "vertical sync": (VerticalSync(), 1, lambda k, i: max(0, i - (DEPTH - 1))),
    "double buffer": (DoubleBuffer(), 4, lambda k, i: max(0, i // 4 - 1)),
}


@pytest.mark.parametrize("optimizer", [SGDM, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", STASHED)
def test_a_loop_over_the_whole_model_with_all_its_versions(name: str, optimizer: AbstractOptimizer) -> None:
    """No stages, no leaves: the gradient of the user's own module at the versions that the literature gives."""
    policy, count, version = STASHED[name]
    job, weights = make_job("Chain4", policy, optimizer, sizes=MINIBATCH // count)
    network = network_of(weights)
    masters = dict(network.named_parameters())
    history = [{key: p.detach().clone() for key, p in masters.items()}]
    torch_optimizer, losses = optimizer.build(list(masters.values())), []
    for step, (x, y) in enumerate(batches()):
        torch_optimizer.zero_grad()
        losses.append(0.0)
        for part in range(count):
            rows = slice(part * MINIBATCH // count, (part + 1) * MINIBATCH // count)
            used = {key: history[version(int(key[1]), step * count + part)][key].clone().requires_grad_() for key in masters}
            value = nn.functional.mse_loss(functional_call(network, used, (x[rows],)), y[rows]) / count
            for key, grad in zip(used, torch.autograd.grad(value, list(used.values())), strict=True):
                masters[key].grad = grad if masters[key].grad is None else masters[key].grad + grad
            losses[-1] += value.item()
        torch_optimizer.step()
        history.append({key: p.detach().clone() for key, p in masters.items()})
    found, state = run_reference(job, weights)
    assert found == pytest.approx(losses, rel=1e-13)
    for key, tensor in masters.items():
        torch.testing.assert_close(state[key], tensor.detach(), rtol=0, atol=1e-13)


def by_hand(
    network: str, ahead: Callable[[int, int], int], back: Callable[[int], int], factor: float = 1.0
) -> tuple[list[float], Tensor]:
    """Backpropagation through four tanh layers in formulas, SGD with momentum in formulas: gradients of weights from what the
    forward saw, gradients of inputs through other weights.

    Args:
        ahead: (stage, mini-batch) -> updates that a forward looks ahead; `back`: the same of a backward, by stage.
        factor: by which layers multiply their weights.
    """
    lr, keeps = SGDM.lr, SGDM.momentum
    _, _, initial = captured(network)
    W = [initial[f"s{k}.0.weight"].clone() for k in range(DEPTH)]
    b = [initial[f"s{k}.0.bias"].clone() for k in range(DEPTH)]
    v = [(torch.zeros_like(W[k]), torch.zeros_like(b[k])) for k in range(DEPTH)]
    history = [[(W[k], b[k], *v[k])] for k in range(DEPTH)]
    losses = []
    for i, (x, y) in enumerate(batches()):
        seen, h = [x], x
        for k in range(DEPTH):
            w0, b0, vw, vb = history[k][max(0, i - (DEPTH - 1 - k))]
            s = ahead(k, i) * lr
            h = torch.tanh(h @ (factor * (w0 - s * vw)).T + (b0 - s * vb))
            seen.append(h)
        losses.append((h - y).square().mean().item())
        grad = 2 * (h - y) / h.numel()
        for k in reversed(range(DEPTH)):
            local = grad * (1 - seen[k + 1] ** 2)
            w, bias, vw, vb = history[k][i]
            grad = local @ (factor * (w - back(k) * lr * vw))
            vw, vb = keeps * vw + factor * local.T @ seen[k], keeps * vb + local.sum(0)
            history[k].append((w - lr * vw, bias - lr * vb, vw, vb))
    return losses, torch.cat([t.flatten() for k in range(DEPTH) for t in history[k][-1][:2]])


MIXED: dict[str, tuple[AbstractWeights, Callable[[int, int], int], Callable[[int], int]]] = {
    "naive": (Naive(), lambda k, i: 0, lambda k: 0),
    "pipeoptim": (PipeOptim(), lambda k, i: min(i, DEPTH - 1 - k), lambda k: 0),
    "pipeoptim offset": (PipeOptim(offset=1), lambda k, i: min(i, DEPTH - 1 - k) + 1, lambda k: 0),
    "spectrain 1": (SpecTrain(form=1), lambda k, i: min(i, DEPTH - 1 - k) + k // 2, lambda k: k // 2),
}


@pytest.mark.parametrize(("network", "factor"), [("Chain4", 1.0), ("Halved4", 0.5)])
@pytest.mark.parametrize("name", MIXED)
def test_backpropagation_by_hand_through_other_weights(name: str, network: str, factor: float) -> None:
    """Also where layers compute with half their weights: a backward then has half of its own weights to go through."""
    policy, ahead, back = MIXED[name]
    found, state = run_reference(*make_job(network, policy, SGDM, overwrites=False))
    losses, end = by_hand(network, ahead, back, factor)
    assert found == pytest.approx(losses, rel=1e-12)
    mine = torch.cat([state[f"s{k}.0.{what}"].flatten() for k in range(DEPTH) for what in ("weight", "bias")])
    torch.testing.assert_close(mine, end, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [SGDM, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", [name for name in FEW if name != "double buffer"])
def test_one_stage_is_plain_training(name: str, optimizer: AbstractOptimizer) -> None:
    """Depth 1: no delay, nothing to predict. It is also what the last stage of any pipeline sees: all methods are one there."""
    model, _, weights = captured("Chain4")
    losses, params = inprocess.reference(model, DATA, optimizer, weights, steps=STEPS, minibatch_size=MINIBATCH, dtype="float64")
    found, state = run_reference(*make_job("Chain4", POLICIES[name], optimizer, whole=True))
    assert found == losses
    assert all(torch.equal(state[key], tensor) for key, tensor in params.items())


def test_without_learning_all_methods_are_one() -> None:
    """A rate of 1e-30 moves no weight: same losses, and same gradients of every stage in every step."""
    seen: dict[str, tuple[list[float], list[Tensor]]] = {}
    for name in FEW:
        job, weights = make_job("Chain4", POLICIES[name], SGD(lr=1e-30, momentum=0.9), sizes=MINIBATCH // 4, steps=6)
        with inprocess.recorded_gradients() as gradients:
            pipeline = Pipeline(job, weights)
            losses = [sum(found.values()) for first, count in pipeline.stretches() for found in pipeline.train(first, count)]
            seen[name] = losses, [grad for stage in pipeline.stages for p in stage.masters for grad in gradients(p)]
        assert all(torch.equal(tensor, weights[key]) for state in pipeline.final_state().values() for key, tensor in state.items())
    losses, gradients_ = seen["stash"]
    assert len(gradients_) == 6 * 2 * DEPTH and max(grad.abs().max() for grad in gradients_) > 1e-3
    for name, (others, theirs) in seen.items():
        assert others == losses, name
        assert all(torch.equal(a, b) for a, b in zip(gradients_, theirs, strict=True)), name


def springs(
    policy: AbstractWeights, optimizer: AbstractOptimizer, steps: int, size: int = MINIBATCH
) -> tuple[list[float], list[float]]:
    """Losses, and the final weight of each stage, of w -> w^2 / 2 at every stage."""
    losses, state = run_reference(*make_job("Springs", policy, optimizer, steps=steps, sizes=size))
    return losses, [state[f"s{k}.w"].item() for k in range(DEPTH)]


def test_double_buffer_has_the_closed_form_of_a_delay_of_one() -> None:
    """w(t+1) = w(t) - lr w(t-1): powers of the roots of r^2 - r + lr = 0."""
    lr, steps = 0.2, 20
    losses, ends = springs(DoubleBuffer(), SGD(lr=lr, momentum=0.0), steps, MINIBATCH // 4)
    r1, r2 = (1 + math.sqrt(1 - 4 * lr)) / 2, (1 - math.sqrt(1 - 4 * lr)) / 2
    one = (1.0 - lr - r2) / (r1 - r2)
    w = [one * r1**t + (1 - one) * r2**t for t in range(steps + 1)]
    assert losses == pytest.approx([DEPTH / 2 * w[max(t - 1, 0)] ** 2 for t in range(steps)], rel=1e-12)
    assert ends == pytest.approx([w[-1]] * DEPTH, rel=1e-12)


PLAIN = [2 * math.sin(math.pi / (2 * (2 * delay + 1))) for delay in range(DEPTH)]
"""Largest stable rate of plain SGD on w^2 / 2 with gradients so many updates old."""
HEAVY = [3.8, 0.100, 0.052, 0.035]
"""The same with momentum 0.9: from the eigenvalues, three digits."""
FORESEEN = [3.8, 0.271, 0.121, 0.073]
"""With momentum, where the gradient is taken at weights predicted that far."""

STABILITY: dict[str, tuple[AbstractWeights, float, list[float], Callable[[int], int]]] = {
    "stash": (Stash(), 0.0, PLAIN, lambda k: DEPTH - 1 - k),
    "vertical sync": (VerticalSync(), 0.0, PLAIN, lambda k: DEPTH - 1),
    "stash, momentum": (Stash(), 0.9, HEAVY, lambda k: DEPTH - 1 - k),
    "pipeoptim, momentum": (PipeOptim(), 0.9, FORESEEN, lambda k: DEPTH - 1 - k),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name != "stash" else name for name in STABILITY],
)
def test_delays_diverge_where_theory_says(name: str) -> None:
    """A stage's weight shrinks at 0.9 times the largest stable rate of its delay, and grows at 1.1 times."""
    policy, momentum, limits, delay = STABILITY[name]
    steps = 300 if momentum else 170  # momentum takes longer to grow
    for k in {delay(k): k for k in (0, DEPTH - 2)}.values():  # the longest delay and a short one
        limit = limits[delay(k)]
        _, shrunk = springs(policy, SGD(lr=0.9 * limit, momentum=momentum), steps)
        _, grown = springs(policy, SGD(lr=1.1 * limit, momentum=momentum), steps)
        assert abs(shrunk[k]) < 0.3 and not abs(grown[k]) < 3.0, (k, shrunk[k], grown[k])


@pytest.mark.parametrize("name", ["stash", "pipeoptim"])
def test_replicas_on_split_data_are_one_stage_with_the_mean_gradient(name: str) -> None:
    alone, one = run_reference(*make_job("Chain", POLICIES[name], ADAMW))
    shared, two = run_reference(*make_job("Chain", POLICIES[name], ADAMW, replicas=(2, 4, 1)))
    assert shared == pytest.approx(alone, rel=1e-12)
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-12)


def test_a_run_goes_on_from_where_the_pipeline_was_empty(tmp_path: Path) -> None:
    settings = {"steps": 24, "checkpoint_every": 8, "checkpoint_drain": True}
    job, weights = make_job("Fork", PipeOptim(horizon_from="constant"), ADAMW, **settings)
    whole, again = tmp_path / "whole", tmp_path / "again"
    resumed, _ = make_job(
        "Fork",
        PipeOptim(horizon_from="constant"),
        ADAMW,
        resume=str(whole / "checkpoints" / "step_16"),
        first_step=16,
        **settings,
    )
    for run_dir, one in ((whole, job), (again, resumed)):
        one.save(run_dir, weights)
        (run_dir / "ranks").mkdir()
        reference_worker._run(one, run_dir, 0, 1, torch.device("cpu"))
        finish_final(one, run_dir)
    first, second = load_final(whole), load_final(again)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    lines = [(run_dir / "ranks" / "rank_0.jsonl").read_text().splitlines() for run_dir in (whole, again)]
    losses = [[(record["step"], record["loss"]) for record in map(json.loads, found)] for found in lines]
    assert len(losses[0]) == 24 and losses[0][16:] == losses[1]


def test_what_the_engine_refuses() -> None:
    job, _ = make_job("Chain4", Stash(), SGDM, checkpoint_every=8)
    with pytest.raises(InvalidConfig, match="saves where the pipeline is empty"):
        Reference().refuse(job)
    first = job.plan.stages[0]
    in_turn = replace(job.plan, stages=(replace(first, devices=(0, 4)).having(IN_TURN), *job.plan.stages[1:]))
    with pytest.raises(UnsupportedPlan, match="in turn"):
        Reference().check(in_turn)


def trained(tmp_path: Path, engine: str, *words: str) -> tuple[dict, dict[str, Tensor]]:
    common = ["logger=none", "cost=analytical", "dtype=float64", "minibatch_size=16", "steps=8", "evaluate_every=5"]
    done = run(tmp_path / engine, *common, f"engine={engine}", *words)
    assert done.code == 0, done.out
    return done.result, load_final(done.run_dir)


@pytest.mark.dist
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("model=digits_deep", "cluster.num_devices=4", "strategy=pipeoptim", "optimizer=adamw"), marks=pytest.mark.long
        ),
        pytest.param(
            (
                "model=digits_tasks",
                "model.num_layers=1",
                "cluster.num_devices=3",
                "strategy=graphpipe",
                "strategy/weights=spectrain",
                "optimizer=sgd",
            ),
            marks=pytest.mark.long,
        ),
        ("model=mlp", "model.num_blocks=2", "cluster.num_devices=2", "strategy=pipeoptim", "optimizer=adamw"),
    ],
    ids=["pipeoptim", "spectrain on branches", "two stages"],
)
def test_the_engine_says_what_a_real_run_says(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Through the whole stack: losses, evaluations, final weights, versions and staleness."""
    real, weights = trained(tmp_path, "distributed", *words)
    # Workers that share cores are planned for, which the loop does not know.
    loop, followed = trained(tmp_path, "reference", *words, f"plan={tmp_path}/distributed/job/plan.json")
    assert (
        loop["loss"] == real["loss"]
        and loop["final_metric"] == real["final_metric"]
        and loop.get("loss_terms") == real.get("loss_terms")
    )
    assert weights.keys() == followed.keys() and all(torch.equal(weights[name], followed[name]) for name in weights)
    assert loop["measured"] is None and "versions" not in real
    for what in ("weight_versions", "staleness"):
        assert loop["versions"][what] == real["measured"][what]
    assert max(loop["versions"]["staleness"].values()) > 0
