"""Stages whose operators are split over devices compute what plain modules on one device compute."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gpp
from baselines.reference.reference import Reference
from gpp import SGD, Adam, Distributed, OneFOneB, Plan
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.graph.captured import Captured
from gpp.graph.op_graph import OpGraph
from gpp.models.base import describe
from gpp.planners.base import AbstractPlanner, Predict
from gpp.runtime.checkpoint.final import load_final
from gpp.runtime.job import Job
from gpp.runtime.worker.worker import Worker
from gpp.serialization import read_json, to_json
from tests.support import inprocess
from tests.support.cli import TOWERS, run
from tests.support.split import halves, named, split_stages
from tests.support.threads import workers_in_threads

SGD_ = SGD(lr=0.1, momentum=0.9)
Cut = Callable[[Problem], Plan]


def alone(degree: int, replicas: int = 1) -> Cut:
    return lambda problem: split_stages(problem, [(problem.graph.all_mask, replicas, degree)], 4)


def chain(*shapes: tuple[int, int]) -> Cut:
    """Two stages, each (replicas, degree); the cut falls into the first layer's MLP, where a tensor is split."""

    def cut(problem: Problem) -> Plan:
        graph = problem.graph
        inside = next(i for i, op in enumerate(graph.ops) if any(v.send for v in op.variants))
        masks = halves(graph, inside + 1)
        return split_stages(problem, [(mask, *shape) for mask, shape in zip(masks, shapes, strict=True)], 4)

    return cut


def towers(text: tuple[int, int], image: tuple[int, int], loss: tuple[int, int]) -> Cut:
    """A DAG of three stages: two towers that do not wait for each other, and their loss."""

    def cut(problem: Problem) -> Plan:
        graph = problem.graph
        masks = [named(graph, "text."), named(graph, "image.")]
        masks.append(graph.all_mask & ~masks[0] & ~masks[1])
        plan = split_stages(problem, [(mask, *s) for mask, s in zip(masks, (text, image, loss), strict=True)], 4)
        assert plan.edges == ((0, 2), (1, 2))
        return plan

    return cut


CASES = {
    "mlp, 2": ("mlp", alone(2)),
    "mlp, 4": ("mlp", alone(4)),
    "attention and embedding, 2": ("char_gpt_small", alone(2)),
    "attention and embedding, 4": ("char_gpt_small", alone(4)),
    "two replicas of 2": ("char_gpt_small", alone(2, 2)),
    "a chain, 2 to 1": ("char_gpt_small", chain((1, 2), (1, 1))),
    "a chain, 1 to 2": ("char_gpt_small", chain((1, 1), (1, 2))),
    "a chain, 4 to 2": ("char_gpt_small", chain((1, 4), (1, 2))),
    "a chain, replicas": ("char_gpt_small", chain((2, 2), (3, 1))),
    "towers": ("clip_small", towers((1, 2), (1, 4), (1, 1))),
    "towers, replicas": ("clip_small", towers((2, 1), (2, 2), (1, 2))),
    "heads of two kinds": ("translator_small", alone(2)),
}


def prepared(name: str, cut: Cut, optimizer: SGD | Adam = SGD_, steps: int = 2, **more: Any):
    model, captured, weights = inprocess.captured_named(name)
    problem = inprocess.problem_of(captured, 8, 8, max_ops=60, global_norm=optimizer.clips_model)
    plan = cut(problem)
    return inprocess.make_job(captured, problem, plan, OneFOneB(), model=model, optimizer=optimizer, steps=steps, **more), weights


SLOW = (
    "mlp, 4",
    "attention and embedding, 2",
    "a chain, 2 to 1",
    "a chain, 1 to 2",
    "heads of two kinds",
    "two replicas of 2",
    "towers",
    "towers, replicas",
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) if case in SLOW else case for case in CASES])
def test_split_stages_equal_one_device(case: str, tmp_path: Path) -> None:
    """Losses, and the gradients of every step: the shares of each parameter are cut from the plain module's."""
    job, weights = prepared(*CASES[case])
    with inprocess.recorded_gradients() as gradients:
        losses, _, workers = inprocess.run(job, tmp_path, weights)
        expected, params = inprocess.reference_of(job, weights)
    assert losses == pytest.approx(expected, abs=1e-12)
    compared, held, whole_size = 0, 0, 0
    for worker in workers:
        for s, module in worker.modules.items():
            shards = worker.teams.shards.get(s)
            for name, param in module.named_parameters():
                held += param.numel() if shards else 0
                whole_size += params[name].numel() if shards else 0
                whole = gradients(params[name])
                for mine, theirs in zip(gradients(param), whole, strict=True):
                    share = shards.share(name, theirs) if shards else theirs
                    torch.testing.assert_close(mine, share, rtol=0, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")
                    compared += 1
    assert compared and held < 0.7 * whole_size, "most parameters of a split stage are split"


def test_clipping_counts_each_share_and_each_whole_parameter_once(tmp_path: Path) -> None:
    job, weights = prepared("char_gpt_small", chain((2, 2), (1, 2)), replace(SGD_, clip_norm=0.05))
    losses, _, workers = inprocess.run(job, tmp_path, weights)
    expected, _ = inprocess.reference_of(job, weights)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert len({float(worker.gradients.norm) for worker in workers if worker.gradients.norm is not None}) == 1


class InTwo(AbstractPlanner):
    """One stage, split over two devices."""

    mechanisms = ("tensor_parallel",)

    def plan(self, problem: Problem, predict: Predict) -> Plan:
        return alone(2)(problem)


def test_a_smaller_mini_batch_is_split_as_the_others_are(tmp_path: Path) -> None:
    """All ids are of the rows that the first member has: without its shards the second one would find other rows for them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    plain, loss = deepcopy(model), nn.functional.cross_entropy
    data = [(torch.randint(10, (n, 2)), torch.randint(5, (n,))) for n in (8, 5)]
    planning = gpp.Planning(strategy=gpp.Strategy(name="x", planner=InTwo(), schedule=OneFOneB()), cost=gpp.Analytical())
    with workers_in_threads():
        pipeline = gpp.parallelize(model, *data[0], loss=loss, strategy=planning, optimizer=SGD_, run=gpp.Run(folder=tmp_path))
        losses = [float(pipeline.step(*batch)) for batch in data]
        pipeline.close()
    expected, optimizer = [], torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in data:
        optimizer.zero_grad()
        expected.append(value := loss(plain(inputs), targets))
        value.backward()
        optimizer.step()
    assert losses == pytest.approx([value.item() for value in expected], abs=1e-12)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


def save(worker: Worker) -> None:
    worker.checkpoints.save(2)
    worker.checkpoints.wait()


def test_a_checkpoint_is_whole_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Four steps in one go, or two under a split plan and two under another, by Adam, whose state is split too."""
    # By Adam a gradient near zero weighs as much as any other, and its rounding with it: attention of few layers has one.
    adam = Adam(lr=0.01)
    job, weights = prepared("mlp", alone(2), adam, steps=4)
    expected, params = inprocess.reference_of(job, weights)
    first = replace(job, settings=replace(job.settings, checkpoint_every=2, steps=2))
    _, _, workers = inprocess.run(first, tmp_path / "first", weights)
    inprocess.in_threads([partial(save, worker) for worker in workers])
    for cut in (alone(4), chain((1, 1), (1, 2)), chain((1, 1), (1, 1))):
        other, _ = prepared("mlp", cut, adam, steps=4)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        resumed = replace(other.settings, resume=str(tmp_path / "first" / "checkpoints" / "step_2"), first_step=2)
        losses, _, workers = inprocess.run(replace(other, settings=resumed), folder, weights, first=2)
        assert losses == pytest.approx(expected[2:], abs=1e-12)
        for worker in workers:
            for name, param in worker.params.items():
                share = worker.teams.split.share(name, params[name]) if worker.teams.split.split(name) else params[name]
                torch.testing.assert_close(param.detach(), share, rtol=0, atol=1e-12)


def test_what_cannot_be_combined_is_refused() -> None:
    job, _ = prepared("mlp", alone(2))
    engine = Distributed()
    engine.refuse(job)
    with pytest.raises(UnsupportedPlan, match=r"stage 0 splits its operators over 2 devices, .*engine=reference"):
        Reference().refuse(job)
    compiled = replace(job, settings=replace(job.settings, compile="inductor"))
    with pytest.raises(InvalidConfig, match=r"engine.compile.*stage 0 splits its operators over 2 devices.*engine.compile=null"):
        engine.refuse(compiled)
    by_stage = {**job.settings.optimizer, "clip_norm": 1.0, "clip_scope": "stage"}
    with pytest.raises(InvalidConfig, match=r"optimizer.clip_scope.*clip_scope=model"):
        engine.refuse(replace(job, settings=replace(job.settings, optimizer=by_stage)))
    with pytest.raises(InvalidConfig, match=r"optimizer=Muon: looks at a whole weight.*stage 0 .*gpp.Adam"):
        engine.refuse(replace(job, settings=replace(job.settings, optimizer=describe(gpp.Muon(lr=0.1)))))
    policy = {"_target_": "gpp.mechanisms.weight_versions.stash.Stash"}
    streaming = replace(job, program=replace(job.program, minibatches=2), settings=replace(job.settings, weights=policy))
    with pytest.raises(InvalidConfig, match=r"strategy.weights.*stash.*strategy/weights=flush"):
        engine.refuse(streaming)


PROCESSES = ["logger=none", "cost=analytical", "dtype=float64", "optimizer=sgd", "optimizer.lr=0.1", "steps=2", "minibatch_size=8"]


@pytest.mark.dist
@pytest.mark.parametrize("case", ["mlp, 2", pytest.param("towers, replicas", marks=pytest.mark.long)])
def test_processes_equal_one_device(case: str, tmp_path: Path) -> None:
    """Real processes and gloo; the weights that they save are whole, and those of the plain modules."""
    name, cut = CASES[case]
    job, weights = prepared(name, cut)
    devices = job.plan.num_devices
    plan = tmp_path / "plan.json"
    plan.write_text(to_json(job.plan))
    source = ["data=synthetic", "data.num_samples=64", "data.num_test_samples=32"]
    words = [
        f"model={name}",
        *inprocess.few_layers(name),
        *source,
        "graph.max_ops=60",
        f"cluster.num_devices={devices}",
        f"plan={plan}",
        "evaluate_every=0",
    ]
    done = run(tmp_path / "run", *PROCESSES, *words)
    assert done.code == 0, done.out
    expected, params = inprocess.reference_of(job, weights)
    assert done.result["loss"] == pytest.approx(expected, abs=1e-12)
    state = load_final(tmp_path / "run")
    assert set(state) >= set(params)
    for param, value in params.items():
        torch.testing.assert_close(state[param], value, rtol=0, atol=1e-12, msg=lambda m, n=param: f"{n}: {m}")


@pytest.mark.dist
def test_random_operators_on_whole_tensors_draw_what_they_draw_on_one_device(tmp_path: Path) -> None:
    """Members that drew other numbers would be told by the losses, and by the sums of their gradients."""
    source = ["model=imported", "model.factory=tests.support.zoo.Dropping", *TOWERS[1:]]
    planned = run(tmp_path / "plan", *PROCESSES, *source, "mode=plan", "explain_s=0", "cluster.num_devices=2", "strategy=even")
    assert planned.code == 0, planned.out
    folder = tmp_path / "plan" / "job"
    captured, graph = read_json(Captured, folder / "model.json"), read_json(OpGraph, folder / "graph.json")
    problem = replace(inprocess.problem_of(captured, 2, 8), graph=graph)
    plan = tmp_path / "split.json"
    plan.write_text(to_json(alone(2)(problem)))
    done = run(tmp_path / "run", *PROCESSES, *source, "cluster.num_devices=2", f"plan={plan}", "evaluate_every=0")
    assert done.code == 0, done.out
    job = Job.load(tmp_path / "run")
    weights = load_file(tmp_path / "run" / "job" / "weights.safetensors")
    expected, _ = inprocess.staged_reference(job, weights)
    assert done.result["loss"] == pytest.approx(expected, abs=1e-12)
