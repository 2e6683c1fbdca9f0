"""Passes in bfloat16, of weights that keep their type: on any cut what PyTorch computes under autocast on one device."""

import random
from pathlib import Path

import pytest
import torch

from gpp import DoubleBuffer, Flush, Stash
from gpp.capture.copies import NarrowCopies, narrow_copy
from gpp.data.synthetic import Synthetic
from gpp.weights.base import AbstractWeights
from tests.runtime.test_options import trained
from tests.support import inprocess
from tests.support.markings import keep, random_case, train
from tests.support.small import Small
from tests.support.training import loss_of


def by_pytorch() -> list[float]:
    """The training of `trained` on one device: losses of two steps, each of two micro-batches."""
    model = Small(kind="Fork")
    network = model.build().train()
    weights = inprocess.capture(model, "float32")[1]
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    samples = Synthetic(num_samples=16, num_test_samples=8).load("train", model, seed=0, dtype="float32")
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), []
    for step in range(2):
        rows = samples.fetch(inprocess.minibatch(step, 8, len(samples), 0))
        optimizer.zero_grad()
        losses.append(0.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for lo in (0, 4):
                value = loss_of(network, model, {name: row[lo : lo + 4] for name, row in rows.items()}) / 2
                with torch.autocast("cpu", enabled=False):
                    value.backward()
                losses[-1] += value.item()
        optimizer.step()
    return losses


def test_stages_compute_what_autocast_computes_and_send_what_they_make(tmp_path: Path) -> None:
    losses, state, workers = trained(tmp_path, "float32", autocast="bfloat16")
    # A message in another type than its tensor's was 0.4 % of a number beside it.
    assert losses == pytest.approx(by_pytorch(), rel=1e-5)
    assert losses != trained(tmp_path / "plain", "float32")[0]
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}
    sent = [spec.dtype for worker in workers for runner in worker.training.runners.values() for spec in runner._specs.values()]
    assert set(sent) == {torch.bfloat16}


@pytest.mark.parametrize("policy", [Flush(), Stash(accumulation=1), DoubleBuffer()])
def test_copies_follow_every_update(policy: AbstractWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a copy of its own in every pass, whichever version of the weights that uses."""
    case = random_case("Fork", policy, random.Random(5), minibatch=16, dtype="float32")
    job = case.job(keep, dtype="float32", autocast="bfloat16")
    found = train(job, case.weights, tmp_path / "a")
    monkeypatch.setattr(NarrowCopies, "of", lambda self, name, weight: narrow_copy(weight, "bfloat16"))
    assert found.differences(train(job, case.weights, tmp_path / "b")) == []


def test_an_update_has_the_room_of_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, step, seen, left = NarrowCopies.of, torch.optim.SGD.step, list[NarrowCopies](), list[str]()

    def noted(self: NarrowCopies, name: str, weight: torch.Tensor) -> torch.Tensor:
        seen.append(self)
        return of(self, name, weight)

    def stepped(self: torch.optim.SGD) -> None:
        own = {param.data_ptr() for group in self.param_groups for param in group["params"]}
        left.extend(name for copies in seen for name, (weight, _) in [*copies._made.items()] if weight.data_ptr() in own)
        step(self)

    monkeypatch.setattr(NarrowCopies, "of", noted)
    monkeypatch.setattr(torch.optim.SGD, "step", stepped)
    trained(tmp_path, "float32", autocast="bfloat16")
    assert seen and not left
