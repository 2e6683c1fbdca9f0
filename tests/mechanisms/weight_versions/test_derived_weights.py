"""Tensors that a model computes from its weights, and backwards that are to use other weights than the forward."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.reference.pipeline import run_reference
from gpp import SGD, DoubleBuffer, Naive, PipeOptim, SpecTrain, Stash, VerticalSync
from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.base import AbstractVersionPolicy
from gpp.mechanisms.weight_versions.job import JOB
from gpp.models.base import describe
from gpp.weights.base import PipelinePosition
from tests.support import inprocess
from tests.support.asynchronous import make_job
from tests.support.long import thinned
from tests.support.staged import captured
from tests.support.weight_uses import CURRENT, DERIVED

SGDM = SGD(lr=0.05, momentum=0.9)
POLICIES: list[AbstractVersionPolicy] = [Naive(), PipeOptim(), PipeOptim(offset=1), SpecTrain(form=1)]


def both(network: str, policy: AbstractVersionPolicy, folder: Path) -> tuple[bool, list[str]]:
    """Whether losses of workers and reference are equal, and the names of the weights that are not; whatever is refused."""
    job, weights = make_job(network, policy, SGDM, steps=8, overwrites=False)
    losses, state, _ = inprocess.run(job, folder, weights)
    expected, theirs = run_reference(job, weights)
    assert state.keys() == theirs.keys()
    return losses == expected, [name for name, tensor in state.items() if not torch.equal(tensor, theirs[name])]


@pytest.mark.parametrize("use", thinned(CURRENT, 8))
def test_workers_equal_the_explicit_backward_where_operators_read_the_weights_themselves(use: str, tmp_path: Path) -> None:
    _, found, _ = captured(f"uses: {use}")
    assert found.derived == ()
    make_job(f"uses: {use}", Naive(), SGDM)
    assert both(f"uses: {use}", Naive(), tmp_path) == (True, [])


@pytest.mark.parametrize("use", thinned(DERIVED, 8))
def test_what_is_refused_would_be_another_training(use: str, tmp_path: Path) -> None:
    network = f"uses: {use}"
    with pytest.raises(InvalidConfig, match="stage 1") as caught:
        make_job(network, Naive(), SGDM)
    _, found, _ = captured(network)
    assert any(derived.params[0] in caught.value.rule and derived.where in caught.value.rule for derived in found.derived)
    make_job(network, Stash(), SGDM)
    equal, differing = both(network, Naive(), tmp_path)
    assert not equal and differing


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy_whose_backward_uses_other_weights_refuses(policy: AbstractVersionPolicy) -> None:
    with pytest.raises(
        InvalidConfig, match=rf"strategy\.weights={policy.name}.*aten\.linear.*s1\.0\.weight.*strategy/weights=stash"
    ):
        make_job("Halved4", policy, SGDM)
    job, _ = make_job("Halved4", policy, SGDM, overwrites=False)
    assert job.captured.derived


@pytest.mark.parametrize("policy", thinned([Stash(), VerticalSync(), SpecTrain(form=2), DoubleBuffer()]), ids=repr)
def test_policies_that_keep_what_the_forward_used_refuse_nothing(policy: AbstractVersionPolicy, tmp_path: Path) -> None:
    job, weights = make_job("Halved4", policy, SGDM, sizes=2 if policy.name == "double_buffer" else 8, steps=8)
    losses, state, _ = inprocess.run(job, tmp_path, weights)
    expected, theirs = run_reference(job, weights)
    assert losses == expected and all(torch.equal(state[name], theirs[name]) for name in theirs)


def test_where_forward_and_backward_use_the_same_weights_nothing_is_refused() -> None:
    """In the last stage of a pipeline, as where a learned temperature is part of the loss."""
    for policy in POLICIES:
        for warmup in range(4):
            for accumulation in (1, 2, 8):
                position = PipelinePosition(warmup=warmup, depth=4, accumulation=accumulation)
                assert policy.changes(position) == (warmup > 0 or policy == PipeOptim(offset=1)), (policy, position)
    make_job("Halved4", Naive(), SGDM, whole=True)
    assert not any(policy.changes(PipelinePosition(warmup=3, depth=4)) for policy in (Stash(), SpecTrain(form=2), DoubleBuffer()))


def test_recurrent_layers_are_refused_on_cuda_alone() -> None:
    """cuDNN packs their weights into a buffer of its own."""
    job, _ = make_job("uses: lstm", Naive(), SGDM)
    card = replace(job, settings=replace(job.settings, device_kind="cuda"))
    JOB.check(replace(card, settings=replace(card.settings, weights=describe(Stash()))), overwrites=True)
    with pytest.raises(InvalidConfig, match=r"aten\.lstm.*s1\.inner\.weight_ih_l0"):
        JOB.check(card, overwrites=True)
