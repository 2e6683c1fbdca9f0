"""A graph of stages as a chain: what crosses each boundary, how it is packed, and what is refused."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.chain import INSTEAD
from baselines.deepspeed import DeepSpeed
from baselines.packing import Packing
from baselines.reference.pipeline import run_reference
from baselines.single import Single
from baselines.torch_pipelining import TorchPipelining
from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.errors import InvalidConfig, UnsupportedPlan
from gpp.plan.build import make_plan
from gpp.plan.chain import PlanChain, refuse_early_loss
from gpp.plan.plan import Plan
from gpp.runtime.engine import task_of
from gpp.runtime.job import Job
from tests.support import inprocess
from tests.support.chain_jobs import Case, final, make, one_device
from tests.support.problems import cluster, random_partition, towers


def problem(num_devices: int = 4) -> Problem:
    return Problem(graph=towers(3, 4), cluster=cluster(num_devices), cost=Constant(), minibatch_size=16)


def plan_of(num_stages: int, *, b: int = 4, seed: int = 0, devices: list[int] | None = None, wide: int = 1) -> Plan:
    p = problem(max(num_stages, wide))
    parts = random_partition(p.graph, num_stages, random.Random(seed))
    placement = [(device,) for device in devices] if devices else None
    return make_plan(p, "test", [(mask, wide) for mask in parts], b, ordered=True, placement=placement)


@pytest.mark.parametrize("seed", range(10))
def test_a_boundary_carries_what_is_made_before_it_and_read_behind_it(seed: int) -> None:
    plan, graph = plan_of(4, seed=seed), problem().graph
    stage_of = {op: s for s, stage in enumerate(plan.stages) for op in stage.ops}
    chain = PlanChain.of(plan, graph)
    for boundary in range(3):
        alive = {
            t.name for t in graph.tensors if stage_of[t.producer] <= boundary < max((stage_of[c] for c in t.consumers), default=-1)
        }
        assert set(chain.carried[boundary]) == alive and len(chain.carried[boundary]) == len(alive)
    assert chain.incoming(0) == chain.outgoing(3) == () and chain.incoming(2) == chain.outgoing(1)


@pytest.mark.parametrize("seed", range(5))
def test_packing_gives_back_what_it_was_given(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws = [
        torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True),
        torch.randint(1 << 40, (3, 2), generator=generator),
        torch.randn(4, generator=generator, dtype=torch.float32),
        torch.rand(3, 7, generator=generator) > 0.5,
        torch.randn(2, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True),
    ]
    order = torch.randperm(len(draws), generator=generator).tolist()[: seed + 1]
    tensors = [draws[i] for i in order]
    packing = Packing(tensors)
    messages = packing.pack(tensors)
    assert sum(message.is_floating_point() for message in messages) == any(t.requires_grad for t in tensors)
    found = packing.unpack([message.clone() for message in messages])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, tensors, strict=True))
    trained = [t for t in tensors if t.requires_grad]
    if trained:
        torch.autograd.backward([f.sum() * (i + 1) for i, f in enumerate(found) if f.requires_grad])
        positions = [i for i, t in enumerate(tensors) if t.requires_grad]
        assert all((t.grad == i + 1).all() for i, t in zip(positions, trained, strict=True))


def test_what_an_engine_of_chains_refuses() -> None:
    for engine in (TorchPipelining(), DeepSpeed()):
        with pytest.raises(UnsupportedPlan, match=r"stage 0 has 2 devices.*gives a stage one device.*replication=false"):
            engine.check(plan_of(1, wide=2))
        uneven = plan_of(3)
        stages = (uneven.stages[0], replace(uneven.stages[1], microbatch_size=8), uneven.stages[2])
        with pytest.raises(UnsupportedPlan, match="stage 1 runs micro-batches of 8 samples"):
            engine.check(replace(uneven, stages=stages))
        with pytest.raises(UnsupportedPlan, match="stage 2 runs 2 forwards in a row"):
            engine.check(replace(uneven, stages=(*uneven.stages[:2], replace(uneven.stages[2], k=2))))
        with pytest.raises(UnsupportedPlan, match="device 0 runs stages 0, 2"):
            engine.check(plan_of(4, devices=[0, 1, 0, 1]))
        with pytest.raises(UnsupportedPlan, match="4 samples leave a smaller one over from 18"):
            engine.check(replace(uneven, minibatch_size=18))
        assert isinstance(engine.check(plan_of(2)), tuple)


def test_what_torchs_schedules_refuse() -> None:
    with pytest.raises(InvalidConfig, match=r"engine.schedule=2F2B"):
        TorchPipelining(schedule="2F2B")
    with pytest.raises(UnsupportedPlan, match="at least as many micro-batches as stages, 4, and there are 2"):
        TorchPipelining().check(plan_of(4, b=8))
    TorchPipelining(schedule="GPipe").check(plan_of(4, b=8))
    interleaved, vee = TorchPipelining(schedule="Interleaved1F1B"), TorchPipelining(schedule="ZBVZeroBubble")
    interleaved.check(plan_of(4, devices=[1, 0, 1, 0]))
    vee.check(plan_of(4, devices=[0, 1, 1, 0]))
    for engine, devices in ((interleaved, [0, 1, 1, 0]), (vee, [0, 1, 0, 1]), (vee, [0, 1, 2, 3])):
        with pytest.raises(UnsupportedPlan, match="places stages"):
            engine.check(plan_of(4, devices=devices))
    with pytest.raises(UnsupportedPlan, match="rounds"):
        TorchPipelining(schedule="InterleavedZeroBubble").check(replace(plan_of(3, b=4), minibatch_size=28))


def test_an_engine_that_leaves_the_model_whole_refuses_stages() -> None:
    with pytest.raises(UnsupportedPlan, match="has 2 stages, but engine=single"):
        Single().check(plan_of(2))


def test_the_loss_must_be_at_the_end(tmp_path: Path) -> None:
    job = make(Case("mlp", "deepspeed"), tmp_path)
    refuse_early_loss(job.plan, task_of(job).losses, "engine=deepspeed", INSTEAD)
    first, *rest = job.plan.stages
    swapped = replace(job.plan, stages=(replace(first, ops=rest[-1].ops), *rest[:-1], replace(rest[-1], ops=first.ops)))
    with pytest.raises(UnsupportedPlan, match="stage 0 makes loss, but stage 2 is the chain's last"):
        refuse_early_loss(swapped, task_of(job).losses, "engine=deepspeed", INSTEAD)


def test_one_device_writes_the_tensors_that_stages_write(tmp_path: Path) -> None:
    """A model whose rotary positions are buffers that are not persistent."""
    case = Case("llama_small", "single", overrides=("model.num_layers=1",))
    one_device(case, tmp_path)
    weights = inprocess.captured_named(case.name, *case.overrides)[2]
    found = final(tmp_path)
    assert found.keys() == run_reference(Job.load(tmp_path), weights)[1].keys() and not any("rotary" in name for name in found)


def test_deepspeeds_norm_of_tied_weights_is_refused(tmp_path: Path) -> None:
    tied = Case("gpt_small", "deepspeed", overrides=("model.tied=true",))
    job, clipped = make(tied, tmp_path / "a"), make(replace(tied, clip_norm=1.0), tmp_path / "b")
    DeepSpeed().refuse_plan(job.plan, task_of(job))
    with pytest.raises(UnsupportedPlan, match=r"is in several stages.*clip_norm=null"):
        DeepSpeed().refuse_plan(clipped.plan, task_of(clipped))
