"""Every engine of others trains to the losses and weights of one device, on chains and on graphs run as chains."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.chain import measured_by_events
from gpp.plan.chain import PlanChain
from gpp.runtime.controller.controller import Follower
from gpp.runtime.engine import Progress
from gpp.runtime.job import Job
from tests.support import session
from tests.support.chain_jobs import HELD_OUT, MICROBATCH, MINIBATCH, STEPS, WORLD, Case, final, make, one_device
from tests.support.long import selected

# The first test waits for all jobs of all engines, which have a limit of their own: one that a busy machine does not reach.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(3600)]

# Smaller pictures leave one pixel to the last norms. The variance of two samples is then next to nothing, and dividing by its root
# multiplies a change of the weights by 1e10 in three steps and by 1e12 in an evaluation; with 64 pixels per side it is 3.
BATCH_NORM = ("model.norm=batch", "model.image_size=64")
CASES = [
    Case("mlp", "data_parallel", stages=1, clip_norm=0.01),
    Case("gpt_small", "torch_pipelining", overrides=("model.tied=true",), clip_norm=0.01),
    Case("mlp", "torch_pipelining", "ZBVZeroBubble", stages=6, down_and_up=True),
    Case("mlp", "deepspeed", clip_norm=0.01),
]
MORE = [
    Case("mlp", "torch_pipelining"),
    Case("gpt_small", "deepspeed", overrides=("model.tied=true",)),
    Case("digits_tasks", "torch_pipelining", "GPipe", seed=8),
    Case("dlrm_small", "torch_pipelining", "InterleavedZeroBubble"),
    Case("dlrm_small", "data_parallel", stages=1, clip_norm=0.01),
    Case("resnet_small", "torch_pipelining", overrides=BATCH_NORM, lr=1e-3),
    Case("llava_small", "torch_pipelining", overrides=("model.frozen=towers",)),
    Case("mlp", "torch_pipelining", "Interleaved1F1B", stages=6),
    Case("llava_small", "deepspeed", overrides=("model.frozen=towers",), clip_norm=0.01),
]


def goes_on(case: Case) -> bool:
    return bool(case.clip_norm) or case.schedule == "ZBVZeroBubble"


def params(cases: list[Case], more: list[Case]) -> list[object]:
    """Of tests: each case, and more where the session runs long tests."""
    return [*(pytest.param(case, id=case.id) for case in cases)] + [
        pytest.param(case, id=case.id, marks=pytest.mark.long) for case in more
    ]


EVERY = params(CASES, MORE)
RESUMED = params([case for case in CASES if goes_on(case)], [case for case in MORE if goes_on(case)])


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """All cases that tests ask for, run by the same three processes."""
    cases = selected(request, "case")
    folder = tmp_path_factory.mktemp("baselines")
    jobs, later = [], []
    for i, case in enumerate(cases):
        worker = "whole_model_worker" if case.engine == "data_parallel" else f"{case.engine}_worker"
        run_dir = folder / str(i)
        job = make(case, run_dir)
        jobs.append((f"baselines.{worker}", run_dir))
        if goes_on(case):
            replace(job, settings=replace(job.settings, checkpoint_every=2)).save(run_dir)
            make(case, run_dir / "resumed")
            source = str(run_dir / "checkpoints" / "step_2")
            replace(job, settings=replace(job.settings, resume=source, first_step=2)).save(run_dir / "resumed")
            later.append((f"baselines.{worker}", run_dir / "resumed"))
    jobs += later
    session.run_all(folder, jobs, WORLD)
    return {case: folder / str(i) for i, case in enumerate(cases)}


def logs(run_dir: Path, world: int) -> Follower:
    follower = Follower(run_dir / "ranks", world, MINIBATCH, Progress())
    follower.poll()
    return follower


@pytest.mark.parametrize("case", EVERY)
def test_losses_weights_and_buffers_of_one_device(case: Case, runs: dict[Case, Path], tmp_path: Path) -> None:
    run_dir = runs[case]
    failed = sorted((run_dir / "ranks").glob("failed_*.txt"))
    assert not failed, failed[0].read_text()
    one_device(case, tmp_path)
    found, expected = logs(run_dir, WORLD), logs(tmp_path, 1)
    # DeepSpeed reckons its norm in float32.
    atol = 1e-6 if case.engine == "deepspeed" and case.clip_norm else 1e-8
    for step in range(STEPS):
        assert found.losses[step] == pytest.approx(expected.losses[step], abs=atol)
    # A metric is a float32 mean on one device.
    assert found.evaluations[STEPS] == pytest.approx(expected.evaluations[STEPS], abs=1e-7, rel=1e-8)
    state, reference = final(run_dir), final(tmp_path)
    assert state.keys() == reference.keys() and len(state) > 2
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, reference[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", RESUMED)
def test_each_goes_on_from_its_checkpoint(case: Case, runs: dict[Case, Path]) -> None:
    whole, again = logs(runs[case], WORLD), logs(runs[case] / "resumed", WORLD)
    assert again.losses == {step: whole.losses[step] for step in range(2, STEPS)}
    state, same = final(runs[case]), final(runs[case] / "resumed")
    assert state.keys() == same.keys()
    # DDP orders its buckets anew after the first step of a process, so its sums over ranks may differ in the last bit.
    atol = 1e-12 if case.engine == "data_parallel" else 0.0
    for name in state:
        torch.testing.assert_close(state[name], same[name], rtol=0, atol=atol)


@pytest.mark.parametrize("case", EVERY)
def test_what_is_measured(case: Case, runs: dict[Case, Path]) -> None:
    """A forward and a whole backward of every micro-batch at every stage, and the bytes of every boundary."""
    job = Job.load(runs[case])
    outcome = measured_by_events(job, runs[case], logs(runs[case], WORLD))
    assert outcome.measured is not None and len(outcome.losses) == STEPS
    size = job.plan.stages[0].microbatch_size
    events, count = outcome.measured.events, MINIBATCH // size
    metrics = outcome.measured.metrics
    assert set(metrics.peak_memory_bytes) == set(range(WORLD)) and min(metrics.peak_memory_bytes.values()) > 0
    if case.engine == "data_parallel":
        assert sorted((e.device, e.microbatch) for e in events if e.kind == "B") == [
            (d, m) for d in range(WORLD) for m in range(count)
        ]
        trained = sum(param.num_bytes for param in job.graph.params if param.trainable)
        assert metrics.communication_bytes == WORLD * round(trained * 2 * (WORLD - 1) / WORLD)
        return
    for s in range(len(job.plan.stages)):
        for kinds in (("F",), ("B", "W")):
            assert sorted(e.microbatch for e in events if e.stage == s and e.kind in kinds) == list(range(count))
        mine = [e for e in events if e.stage == s and e.kind in "FBIW"]
        assert all(e.device == job.plan.stages[s].devices[0] and e.end_s >= e.start_s for e in mine)
    most = dict.fromkeys(range(len(job.plan.stages)), MICROBATCH * count)
    assert all(MICROBATCH <= held <= most[s] for s, held in metrics.max_in_flight_samples.items())
    assert case.schedule != "GPipe" or metrics.max_in_flight_samples == most
    if not job.settings.optimizer["clip_norm"] and len(job.plan.stages) == WORLD and case.name == "mlp":
        size = {t.name: t.bytes_per_sample * (1 + t.differentiable) for t in job.graph.tensors}
        chain = PlanChain.of(job.plan, job.graph)
        carried = sum(size[name] for names in chain.carried for name in names)
        assert metrics.communication_bytes == round(carried * MINIBATCH)


def test_deepspeed_would_have_clipped(tmp_path: Path) -> None:
    """The cases above can fail where DeepSpeed clips at 1.0 as it does by default: their gradients are larger than that."""
    case = Case("digits", "deepspeed")
    one_device(case, tmp_path / "plain")
    one_device(replace(case, clip_norm=1.0), tmp_path / "clipped")
    plain, clipped = final(tmp_path / "plain"), final(tmp_path / "clipped")
    assert any((plain[name] - clipped[name]).abs().max() > 1e-6 for name in plain)
    assert HELD_OUT % MICROBATCH  # and the last micro-batch of an evaluation is not whole
