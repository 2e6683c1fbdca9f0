"""Weight policies on real workers: the versions that passes use, copies that are held, checkpoints of a full pipeline, clipping."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpp import DoubleBuffer, Even, Flush, Naive, NoFlush, OneFOneB, PipeOptim, SpecTrain, Stash, Strategy, VerticalSync
from gpp.errors import InvalidConfig, InvalidPlan, MalformedProgram
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.optimizers import SGD, AbstractOptimizer, Adam, LearningRate
from gpp.program.cards import check_cards
from gpp.program.program import reduce_groups
from gpp.runtime.job import Job
from gpp.weights.base import AbstractWeights
from tests.support import inprocess
from tests.support.asynchronous import MINIBATCH, make_job
from tests.support.long import thinned

DEPTH, STEPS = 4, 17
SGDM = SGD(lr=0.05, momentum=0.9)
POLICIES: list[AbstractVersionPolicy] = [
    Naive(), Stash(), VerticalSync(), DoubleBuffer(), SpecTrain(), SpecTrain(form=2), PipeOptim(), PipeOptim(offset=1)
]  # fmt: skip
NAMES = [f"{p.name}{getattr(p, 'form', '')}{getattr(p, 'offset', '')}" for p in POLICIES]


def job_of(
    weights: AbstractWeights, optimizer: AbstractOptimizer | None = None, **settings: Any
) -> tuple[Job, dict[str, torch.Tensor]]:
    """Four stages of a layer each."""
    sizes = MINIBATCH // DEPTH if isinstance(weights, DoubleBuffer) else MINIBATCH
    return make_job("Chain4", weights, optimizer or SGDM, **{"steps": STEPS, "sizes": sizes} | settings)


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_every_pass_uses_the_version_of_the_table(policy: AbstractVersionPolicy, tmp_path: Path, monkeypatch) -> None:
    job, initial = job_of(policy)
    job.save(tmp_path, initial)
    workers = inprocess.workers_of(job, tmp_path)
    for worker in workers:
        for weights in worker.weights.values():
            weights.log = []
    inprocess.in_threads([lambda w=w: w.train(0, STEPS, lambda record: None) for w in workers])
    for worker in workers:
        (stage,) = worker.stages
        place, weights = job.plan.position(stage), worker.weights[stage]
        count = STEPS * place.accumulation
        assert place.warmup == DEPTH - 1 - stage
        expected = {("F", j): policy.forward_version(place, j) for j in range(count)}
        expected |= {("B", j): policy.backward_version(place, j) for j in range(count)}
        assert {(kind, j): version for kind, j, version in weights.log or ()} == expected
        assert len(weights.log or ()) == 2 * count
        assert weights.copies == policy.copies(place)
        assert weights.staleness == policy.staleness(place)
        assert weights.version == STEPS
        # The micro-batches in flight: as many as the distance to the sink.
        ahead = most = 0
        for kind, _, _ in weights.log or ():
            ahead += 1 if kind == "F" else -1
            most = max(most, ahead)
        assert most == DEPTH - stage
        addresses = {t.data_ptr() for tensors in (weights.own, *weights.scratch()) for t in tensors}
        assert len(addresses) == (1 + len(weights.scratch())) * len(weights.masters), "a copy is memory of its own"


@pytest.mark.parametrize(
    "policy", thinned([p for p in POLICIES if p.repeats], 3), ids=[n for p, n in zip(POLICIES, NAMES, strict=True) if p.repeats]
)
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(SGD(lr=0.05, momentum=0.9), marks=pytest.mark.long, id="sgd"),
        pytest.param(Adam(lr=0.002, weight_decay=0.1, decoupled=True), id="adamw"),
    ],
)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_of_a_full_pipeline(
    policy: AbstractVersionPolicy, optimizer: AbstractOptimizer, tmp_path: Path
) -> None:
    optimizer = replace(optimizer, learning_rate=LearningRate(shape="cosine"))
    job, initial = job_of(policy, optimizer=optimizer, checkpoint_every=6, checkpoint_keep=9)
    whole = tmp_path / "whole"
    losses, state, workers = inprocess.run(job, whole, initial)
    for worker in workers:
        worker.checkpoints.wait()
    for done in (6, 12):
        folder = whole / "checkpoints" / f"step_{done}"
        again = replace(job, settings=replace(job.settings, resume=str(folder), first_step=done, checkpoint_every=0))
        went_on, end, _ = inprocess.run(again, tmp_path / f"from_{done}", initial, first=done)
        assert went_on == losses[done:]
        assert all(torch.equal(end[name], tensor) for name, tensor in state.items())


def test_under_another_plan_what_was_in_flight_is_forgotten(tmp_path: Path) -> None:
    job, initial = job_of(Stash(), checkpoint_every=6, checkpoint_keep=9)
    _, _, workers = inprocess.run(job, tmp_path / "whole", initial)
    for worker in workers:
        worker.checkpoints.wait()
    folder = tmp_path / "whole" / "checkpoints" / "step_6"
    other, _ = job_of(Flush())
    other = replace(other, settings=replace(other.settings, resume=str(folder), first_step=6))
    losses, _, workers = inprocess.run(other, tmp_path / "other", initial, first=6)
    assert all(worker.checkpoints.in_flight(worker.params) is None for worker in workers)
    assert losses[-1] < losses[0]


def test_a_policy_that_repeats_no_forward_asks_for_a_drain() -> None:
    with pytest.raises(InvalidConfig, match=r"checkpoint\.drain=true"):
        job_of(Naive(), checkpoint_every=5)
    job, _ = job_of(Naive(), checkpoint_every=5, checkpoint_drain=True)
    assert job.settings.checkpoint_drain


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_casts_and_compiled_stages_are_refused_where_they_would_see_other_weights(policy: AbstractVersionPolicy) -> None:
    with pytest.raises(InvalidConfig, match=r"engine\.compile=inductor"):
        job_of(policy, compile="inductor")
    if policy.backward == "same":
        assert job_of(policy, autocast="bfloat16")[0].settings.autocast == "bfloat16"
    else:
        with pytest.raises(InvalidConfig, match=r"engine\.autocast=bfloat16"):
            job_of(policy, autocast="bfloat16")


def test_a_drain_before_checkpoints_changes_the_order_of_updates(tmp_path: Path) -> None:
    drained, initial = job_of(Stash(), checkpoint_every=5, checkpoint_drain=True)
    full, _ = job_of(Stash(), checkpoint_every=5)
    a, b = (inprocess.run(job, tmp_path / name, initial)[0] for job, name in ((drained, "drained"), (full, "full")))
    assert a[:5] == b[:5]
    assert a[5:] != b[5:]


def test_stages_clip_by_their_own_norms_without_a_drain(tmp_path: Path) -> None:
    clipped, initial = job_of(Stash(), optimizer=SGD(lr=0.05, momentum=0.9, clip_norm=0.05, clip_scope="stage"))
    with inprocess.recorded_gradients() as gradients:
        _, _, workers = inprocess.run(clipped, tmp_path / "clipped", initial)
        norms = []
        for worker in workers:
            seen = [gradients(p) for p in worker.weights[worker.stages[0]].own]
            norms += [torch.cat([g[step].flatten() for g in seen]).norm() for step in range(len(seen[0]))]
    assert norms
    assert max(norms) <= 0.05 * (1 + 1e-6)
    assert max(norms) > 0.049


def test_what_makes_no_sense_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidConfig, match="at least 4 micro-batches in a mini-batch"):
        job_of(DoubleBuffer(), sizes=MINIBATCH // 2)
    with pytest.raises(InvalidConfig, match="drains before every update"):
        Strategy(name="test", planner=Even(), schedule=OneFOneB(), weights=Stash())
    with pytest.raises(InvalidConfig, match="does not drain"):
        Strategy(name="test", planner=Even(), schedule=NoFlush())
    job, _ = job_of(Stash())
    stage = replace(job.plan.stages[0], k=2, in_flight=job.plan.stages[0].in_flight * 2)
    with pytest.raises(InvalidPlan, match="k=1"):
        NoFlush().warmup(replace(job.plan, stages=(stage, *job.plan.stages[1:])), 0, 8)


@pytest.mark.parametrize("weights", [Flush(), Stash()], ids=["drains", "streams"])
def test_programs_of_a_job_for_cards(weights: AbstractWeights, tmp_path: Path) -> None:
    """They are in the order for cards, which is proved before a process starts and where a job is read."""
    gloo, _ = job_of(weights, held_out=40)
    cards, _ = job_of(weights, held_out=40, device_kind="cuda")
    assert (gloo.settings.backend, cards.settings.backend) == ("gloo", "nccl")
    groups = reduce_groups(cards.plan, cards.graph)
    assert cards.evaluation is not None
    check_cards(cards.program, cards.plan, groups)
    check_cards(cards.evaluation, cards.plan, groups)
    with pytest.raises(MalformedProgram, match="on cards"):
        check_cards(gloo.program, cards.plan, groups)
    cards.save(tmp_path)
    assert Job.load(tmp_path) == cards
    (tmp_path / "job" / "program.txt").write_text(gloo.program.to_text())
    with pytest.raises(MalformedProgram, match=r"program\.txt: .*on cards"):
        Job.load(tmp_path)
