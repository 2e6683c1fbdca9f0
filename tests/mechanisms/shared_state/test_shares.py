"""`optimizer.shard=replicas`: the training is the same as without it, and each state is held once in a stage.

Checkpoints are equal, too, and any other run goes on from them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpp import OneFOneB, Stash
from gpp.cost.stage import StageCost, stage_bytes
from gpp.errors import InvalidConfig
from gpp.mechanisms.shared_state.asked import SharedUpdates, share_out
from gpp.mechanisms.shared_state.job import JOB
from gpp.mechanisms.tensor_parallel.stage import TensorParallel
from gpp.models.base import describe
from gpp.optimizers import SGD, AbstractOptimizer, Adam, Muon
from gpp.plan.build import make_plan
from gpp.runtime.checkpoint.final import load_final
from gpp.runtime.checkpoint.resume import Checkpoints, find
from gpp.runtime.job import Job
from gpp.runtime.job_asked import with_asked
from tests.runtime.test_checkpoint import train
from tests.support import inprocess, staged
from tests.support.cli import run
from tests.support.long import thinned
from tests.support.staged import captured, problem_of

STEPS = 4
OPTIMIZERS: dict[str, AbstractOptimizer] = {
    "adam": Adam(lr=0.01, weight_decay=0.01),
    "adamw, clipped": Adam(lr=0.01, weight_decay=0.01, decoupled=True, clip_norm=0.05),
    "momentum, clipped": SGD(lr=0.3, momentum=0.9, clip_norm=0.05),
    "muon": Muon(lr=0.01),
}


def job_of(
    optimizer: AbstractOptimizer, replicas: tuple[int, ...], network: str = "Fork", **more: Any
) -> tuple[Job, dict[str, torch.Tensor]]:
    """A graph of stages, some of them replicated."""
    return staged.job_of(network, OneFOneB(), replicas=replicas, optimizer=optimizer, steps=STEPS, settings=more)


def shared(optimizer: AbstractOptimizer) -> AbstractOptimizer:
    return replace(optimizer, shard="replicas")  # type: ignore[type-var]


def state_of(workers: list[Any]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """For each worker: parameter -> slot -> its state."""
    out = []
    for worker in workers:
        name_of = {id(param): name for name, param in worker.params.items()}
        states = [optimizer.state for optimizer in worker.optimizers.values()]
        out.append({name_of[id(param)]: dict(slots) for state in states for param, slots in state.items()})
    return out


@pytest.mark.parametrize("name", thinned(OPTIMIZERS, 3))
def test_weights_equal_those_without_bit_for_bit(name: str, tmp_path: Path) -> None:
    optimizer, replicas = OPTIMIZERS[name], (2, 1, 2, 2)
    plain, weights = job_of(optimizer, replicas)
    sharing, _ = job_of(shared(optimizer), replicas)
    losses, expected, whole = inprocess.run(plain, tmp_path / "plain", weights)
    same, found, workers = inprocess.run(sharing, tmp_path / "sharing", weights)
    assert same == losses and expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert any(not torch.equal(found[key], weights[key]) for key in expected), "nothing was trained"
    # Every replica has all weights again, and of each state one has it: what all have without sharing.
    for worker, other in zip(workers, whole, strict=True):
        assert all(torch.equal(param, other.params[key]) for key, param in worker.params.items())
    states, wholes = state_of(workers), state_of(whole)
    for stage in sharing.plan.stages:
        own, full = [states[d] for d in stage.devices], wholes[stage.devices[0]]
        assert sorted(key for state in own for key in state) == sorted(full), "each state is somewhere, and once"
        assert len(own) == 1 or max(map(len, own)) < len(full)
        for state in own:
            for key, slots in state.items():
                assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(full[key][slot])) for slot, value in slots.items())


def test_three_replicas_sum_in_another_order(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["adamw, clipped"]
    plain, weights = job_of(optimizer, (3, 1, 3, 1))
    _, expected, _ = inprocess.run(plain, tmp_path / "plain", weights)
    _, found, _ = inprocess.run(job_of(shared(optimizer), (3, 1, 3, 1))[0], tmp_path / "sharing", weights)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-12)


def test_checkpoints_are_those_of_a_run_without_and_go_on_under_other_replicas(tmp_path: Path) -> None:
    optimizer, every = OPTIMIZERS["adam"], Checkpoints(every=2, keep=5)

    def saved(run_dir: Path, step: int) -> tuple[dict[str, torch.Tensor], list[set[str]]]:
        files = sorted((run_dir / "checkpoints" / f"step_{step}").glob("rank_*.safetensors"))
        parts = [load_file(file) for file in files]
        return {name: tensor for part in parts for name, tensor in part.items()}, [set(part) for part in parts]

    plain, weights = job_of(optimizer, (2, 1, 2, 2))
    sharing, _ = job_of(shared(optimizer), (2, 1, 2, 2))
    losses, end = train(plain, tmp_path / "plain", weights, every)
    train(sharing, tmp_path / "sharing", weights, every)
    expected, _ = saved(tmp_path / "plain", 2)
    found, parts = saved(tmp_path / "sharing", 2)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(map(len, parts)) == len(found), "every tensor is saved once"
    holders = {part for part in range(len(parts)) if any(name.startswith("optimizer.") for name in parts[part])}
    assert len(holders) > len(sharing.plan.stages), "replicas save their shares themselves"
    for number, (replicas, before) in enumerate((((2, 1, 2, 2), "sharing"), ((1, 2, 1, 3), "sharing"), ((2, 1, 2, 2), "plain"))):
        job, _ = job_of(shared(optimizer), replicas)
        resumed = find(str(tmp_path / before / "checkpoints" / "step_2"), STEPS)
        own, state = train(job, tmp_path / str(number), weights, every, resumed)
        assert [own[step] for step in (2, 3)] == pytest.approx([losses[step] for step in (2, 3)], abs=1e-12)
        for name, tensor in end.items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)


def test_the_bill_has_the_fullest_share() -> None:
    sizes = {"a": 8.0, "b": 4.0, "c": 3.0, "d": 1.0}
    assert share_out(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 1} and SharedUpdates().largest(sizes, 2) == 0.5
    assert SharedUpdates().largest({"a": 90.0, "b": 5.0, "c": 5.0}, 2) == 0.9 and SharedUpdates().largest({}, 2) == 1.0
    _, found, _ = captured("Fork")
    problem = replace(problem_of(found, OneFOneB(), 3), optimizer_state_factor=2.0)
    sharing = replace(problem, updates=SharedUpdates())
    plan = make_plan(problem, "test", [(problem.graph.all_mask, 3)], 3)
    stage, names = plan.stages[0], {name for op in problem.graph.trained_by for name in op}
    trained = {name: problem.graph.param_of[name].num_bytes for name in names}
    held = [0.0] * 3
    for name, replica in share_out(trained, 3).items():
        held[replica] += trained[name]
    less = stage_bytes(problem, stage).static - stage_bytes(sharing, stage).static
    assert less == pytest.approx(2.0 * (sum(trained.values()) - max(held))) and less > 2.0 * 0.5 * sum(trained.values())
    plain, other = StageCost.of(problem, stage), StageCost.of(sharing, stage)
    fixed = problem.cost.update_s(0.0, problem.cluster.devices[0])
    assert other.update_s - fixed == pytest.approx((plain.update_s - fixed) * max(held) / sum(held))
    assert (other.forward_s, other.microbatch_bytes) == (plain.forward_s, plain.microbatch_bytes)
    alone = make_plan(problem, "test", [(problem.graph.all_mask, 1)], 3).stages[0]
    assert stage_bytes(sharing, alone) == stage_bytes(problem, alone)


@pytest.mark.parametrize(
    ("network", "replicas", "more", "says"),
    [
        ("Tied", (2, 1, 3), {}, "stage 0 shares"),
        ("Fork", (2, 1, 2, 2), {"device_kind": "cuda"}, "a worker on a card"),
        (
            "Fork",
            (2, 1, 2, 2),
            {"optimizer": Adam(lr=0.1, clip_norm=1.0, clip_scope="stage", shard="replicas")},
            "norm of its stage",
        ),
    ],
)
def test_what_cannot_share_is_refused(network: str, replicas: tuple[int, ...], more: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"optimizer\.shard=replicas: .*{says}.*Fix: set optimizer.shard=none, or"):
        job_of(more.pop("optimizer", shared(OPTIMIZERS["adam"])), replicas, network, **more)


def test_weights_in_versions_and_stages_on_one_device_are_refused() -> None:
    job, _ = job_of(shared(OPTIMIZERS["adam"]), (2, 1, 2, 2))
    with pytest.raises(InvalidConfig, match=r"strategy.weights=stash holds versions.*strategy/weights=flush"):
        JOB.check(replace(job, settings=replace(job.settings, weights=describe(Stash()))), overwrites=True)
    crowded = replace(job.plan, stages=tuple(replace(stage, devices=(0, 1)) for stage in job.plan.stages))
    with pytest.raises(InvalidConfig, match=r"stage 0 is on a device with other stages.*colocate=never"):
        JOB.check(replace(job, plan=crowded), overwrites=True)
    problem = with_asked(problem_of(job.captured, OneFOneB(), 7), shared(OPTIMIZERS["adam"]), {})
    assert problem.refuses(job.plan) is None and "on a device with other" in (problem.refuses(crowded) or "")
    split = replace(job.plan.stages[0], devices=(0, 1, 7, 8)).having(TensorParallel(degree=2))
    with pytest.raises(InvalidConfig, match=r"stage 0 splits its operators over 2 devices.*tensor_parallel=false"):
        JOB.check(replace(job, plan=replace(job.plan, stages=(split, *job.plan.stages[1:]))), overwrites=True)


@pytest.mark.dist
def test_real_workers_train_alike(tmp_path: Path) -> None:
    words = ["model=digits", *inprocess.few_layers("digits"), "strategy=data_parallel", "engine=distributed", "baselines_s=0"]
    words += [
        "cluster.num_devices=2",
        "cost=analytical",
        "logger=none",
        "dtype=float64",
        "steps=3",
        "evaluate_every=0",
        "optimizer.clip_norm=0.1",
    ]
    done = run(tmp_path, "-m", *words, "optimizer.clip_norm=0.1", "optimizer.shard=none,replicas")
    assert done.code == 0, done.out
    plain, sharing = (tmp_path / job["folder"] for job in json.loads((tmp_path / "jobs.json").read_text()))
    expected, found = load_final(plain), load_final(sharing)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()
    results = [json.loads((folder / "result.json").read_text()) for folder in (plain, sharing)]
    for source in ("measured", "predicted"):
        without, shared_out = (result[source]["peak_memory_bytes"].values() for result in results)
        assert max(shared_out) < min(without)
    assert json.loads((sharing / "job" / "settings.json").read_text())["optimizer"]["shard"] == "replicas"
