"""The first lines that users of ten peers type: they work, or the answer has the words to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpp
from gpp.app.composing import strategy_of
from gpp.app.words import ANSWERS, INSTEAD, RENAMED
from gpp.errors import InvalidConfig
from tests.support.conf import option
from tests.support.threads import workers_in_threads

SIZE, WIDTH = 8, 6


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(SIZE, WIDTH).double(), torch.randn(SIZE, 3).double()) for _ in range(steps)]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., gpp.Pipeline]]:
    """`gpp.parallelize` of the model above, its workers as threads."""

    def start(model: nn.Module | None = None, **given: Any) -> gpp.Pipeline:
        planning = gpp.Planning(strategy="even", cost=gpp.Analytical())
        folder = gpp.Run(folder=tmp_path / "run")
        return gpp.parallelize(model or model_of(), *data(1)[0], **{"loss": mse_loss, "strategy": planning, "run": folder, **given})

    with workers_in_threads():
        yield start


def plain(steps: int, optimizer: Callable[..., Any], scheduler: Callable[..., Any] | None = None) -> list[float]:
    """Losses of the loop of torch's tutorials."""
    model, losses = model_of(), []
    step = optimizer(model.parameters())
    rate = scheduler(step) if scheduler else None
    for inputs, targets in data(steps):
        step.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        step.step()
        if rate:
            rate.step()
        losses.append(loss.item())
    return losses


ADAM = partial(torch.optim.AdamW, lr=1e-2)
HALVING = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)


def test_a_training_of_lightning_or_accelerate_goes_on_as_if_it_had_not_stopped(started: Any, tmp_path: Path) -> None:
    """The optimizer and the scheduler of a torchrun script, hooks, checkpoints, `resume`: the losses of the plain loop."""
    seen, found = list[tuple[int, float]](), list[float]()
    for steps in (4, 10):
        model = model_of()
        optimizer = ADAM(model.parameters())
        run = gpp.Run(folder=tmp_path / "run", checkpoint=gpp.Checkpoints(every=2), resume="auto", progress=gpp.Progress())
        with started(model, optimizer=optimizer, run=run) as pipeline:
            hook: Any = lambda step, loss, rate: seen.append((step, loss))  # noqa: E731
            # The run that stops has saved after step 2 alone: the last checkpoint is not a step's own.
            steps = 3 if steps == 4 else steps
            found += pipeline.train(data(10), steps, scheduler=HALVING(optimizer), on_step=hook, held_out=data(1)[0])
            assert pipeline.done == steps and pipeline._usual == set(range(pipeline._job.settings.first_step, steps))
    expected = plain(10, ADAM, HALVING)
    assert found[:3] == pytest.approx(expected[:3], rel=1e-12) and found[3:] == pytest.approx(expected[2:], rel=1e-12)
    assert [step for step, _ in seen] == [1, 2, 3, *range(3, 11)] and [loss for _, loss in seen] == found


def test_a_loss_is_asked_as_a_tensor_is(started: Any) -> None:
    """`loss.item()` of every loop works; `loss.backward()` is answered."""
    with started(optimizer=ADAM) as pipeline:
        loss = pipeline.step(*data(1)[0])
        assert loss.item() == loss.detach() == pipeline.losses[0] == pytest.approx(plain(1, ADAM)[0])
        with pytest.raises(InvalidConfig, match=r"leave out loss.backward\(\) and optimizer.step\(\)"):
            loss.backward()
        for name in INSTEAD:
            with pytest.raises(AttributeError, match=f"a pipeline has no {name}: "):
                getattr(pipeline, name)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            pipeline.nothing  # noqa: B018
        with pytest.raises(InvalidConfig, match=r"pipeline.step\(inputs, targets\)"):
            pipeline(data(1)[0][0])


@pytest.mark.parametrize(
    ("words", "form", "holds"),
    [
        ({"chunks": 4}, "strategy=gpp.Planning(microbatch_size=2)", lambda p: p.plan.stages[0].microbatch_size == 2),
        ({"n_microbatches": 2}, "strategy=gpp.Planning(microbatch_size=4)", lambda p: p.plan.stages[0].microbatch_size == 4),
        ({"gradient_accumulation_steps": 8}, "microbatch_size=1", lambda p: p.plan.stages[0].microbatch_size == 1),
        ({"mixed_precision": "bf16"}, "autocast='bfloat16'", lambda p: p._job.settings.autocast == "bfloat16"),
        ({"precision": "bf16-mixed"}, "autocast='bfloat16'", lambda p: p._job.settings.autocast == "bfloat16"),
        ({"loss": None, "loss_fn": mse_loss}, "loss=gpp.Loss(function=...)", lambda p: p.step(*data(1)[0]) > 0),
        (
            {"run": None, "checkpoint_dir": "kept", "save_steps": 5, "seed": 3},
            "run=gpp.Run(folder='kept'), run=gpp.Run(checkpoint=gpp.Checkpoints(every=5)), run=gpp.Run(seed=3)",
            lambda p: (p.run_dir, p._job.settings.checkpoint_every, p._job.settings.seed) == (Path("kept"), 5, 3),
        ),
    ],
    ids=["torchgpipe", "torch", "huggingface", "accelerate", "lightning", "torchtitan", "earlier"],
)
def test_words_of_peers_are_understood(
    started: Any, tmp_path: Path, monkeypatch: Any, words: dict[str, Any], form: str, holds: Callable[[gpp.Pipeline], bool]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_of().float() if "precision" in str(words) else model_of()
    examples = [tensor.to(next(model.parameters()).dtype) for tensor in data(1)[0]]
    given = {"loss": mse_loss, "strategy": gpp.Planning(strategy="even", cost=gpp.Analytical()), "run": gpp.Run(folder="run")}
    with pytest.warns(FutureWarning) as said:
        pipeline = gpp.parallelize(model, *examples, **{**given, **words})
    assert form in str(said[0].message) and said[0].filename == __file__
    with pipeline:
        assert holds(pipeline)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ({"chunks": 3}, "chunks=3: must divide the 8 samples of a mini-batch"),
        ({"mixed_precision": "fp8"}, "must be bf16 or fp16"),
        ({"checkpoint_dir": "kept", "run": None}, "says where checkpoints lie, and not how often"),
        ({"microbatch_size": 2, "strategy": gpp.Planning(microbatch_size=4)}, "which has a value already"),
        ({"microbach_size": 2}, r"say strategy=gpp.Planning\(microbatch_size=...\)"),
        ({"optimiser": "adam"}, "say optimizer=..."),
        ({"wholly_unknown_thing": 1}, "gpp.Run has folder, steps, seed"),
        ({"strategy": "graphpip"}, "strategy=graphpip: is no strategy. Fix: say strategy='graphpipe'"),
        ({"strategy": "even planner.patience=3"}, "strategy.planner.patience=3: is no setting of strategy=even"),
        ({"strategy": "deepspeed"}, "is planned for engine=deepspeed"),
        ({"strategy": 3}, "must be a word of conf/strategy"),
        *(({word: 1}, fix) for word, fix in ANSWERS.items() if word != "optimizer"),
    ],
)
def test_other_words_are_answered(started: Any, words: dict[str, Any], answer: str) -> None:
    with warnings.catch_warnings(), pytest.raises(InvalidConfig) as error:
        warnings.simplefilter("error")
        started(**words)
    assert answer.replace("\\", "") in str(error.value)


def test_words_of_other_meanings_are_fields() -> None:
    """Every renamed word is a field of the value that it stands for."""
    for kind, name in RENAMED.values():
        assert name in {setting.name for setting in fields(kind)}
    assert not set(RENAMED) & set(ANSWERS)


def test_a_loader_that_ends_is_told(started: Any) -> None:
    with started(optimizer=ADAM) as pipeline:
        with pytest.raises(InvalidConfig, match="has ended after 2 batches"):
            pipeline.train(iter(data(2)), 3)
        assert pipeline.done == 2
        with pytest.raises(InvalidConfig, match="of which 2 are done"):
            pipeline.train(data(2), 2)
        with pytest.raises(InvalidConfig, match="a loader without a length"):
            pipeline.train(iter(data(2)))
        with pytest.raises(InvalidConfig, match=r"must be \(inputs, targets\)"):
            pipeline.train([data(1)[0][0]])
        with pytest.raises(InvalidConfig, match="follows the number of steps"):
            pipeline.train(data(1), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(ADAM(model_of().parameters())))


@pytest.mark.parametrize("words", ["graphpipe planner.patience=20 schedule=gpipe memory=auto"])
def test_a_strategy_in_words_is_that_of_the_command_line(words: str) -> None:
    name, *more = words.split()
    overrides = [f"strategy.{word}" if "." in word else f"strategy/{word}" for word in more]
    assert strategy_of(words) == option("strategy", name, *overrides)
