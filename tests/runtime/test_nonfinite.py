"""A training whose values are not finite says in which step, stage and micro-batch that began, and stops."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.harness import Harness
from baselines.reference.pipeline import Pipeline
from baselines.whole_model_worker import WholeModel
from gpp import SGD, Adam, Plan
from gpp.data import digits
from gpp.data.sampler import minibatch
from gpp.errors import NonFinite
from gpp.mechanisms.marks.stage import marked
from gpp.runtime.job import Job
from gpp.runtime.nonfinite import Finding, PassPlace, Probes, Seen, told
from tests.support import inprocess
from tests.support.checkpoints import MINIBATCH, random_job
from tests.support.cli import run
from tests.support.long import thinned

NAN = float("nan")


class Poison:
    """Makes one value of a stage's pass over given samples of a given step not finite.

    Args:
        kind: `forward` for a tensor that it makes, `gradient` for the gradient of one, `none` for neither.
    """

    def __init__(self, kind: str, stage: int, step: int, sample: int) -> None:
        self.kind, self.stage, self.step, self.sample = kind, stage, step, sample

    def into(self, module: torch.nn.Module, step: Callable[[], int]) -> None:
        """Spoil passes of the stage's module; those of a step come in the order of its samples."""
        at, forward = {"step": -1, "sample": 0}, module.forward

        def spoilt(num_samples: int, values: dict[str, torch.Tensor], *watcher: object) -> dict[str, torch.Tensor]:
            outputs = forward(num_samples, values, *watcher)
            if at["step"] != step():
                at.update(step=step(), sample=0)
            first, at["sample"] = at["sample"], at["sample"] + num_samples
            if (at["step"], first) != (self.step, self.sample) or self.kind == "none":
                return outputs
            name = next(name for name, tensor in outputs.items() if tensor.requires_grad)
            if self.kind == "gradient":
                outputs[name].register_hook(lambda grad: grad * NAN)
                return outputs
            return {**outputs, name: outputs[name] * NAN}

        module.forward = spoilt


def poisoned_by_workers(job: Job, run_dir: Path, weights: dict[str, torch.Tensor], poison: Poison) -> list[str]:
    """What the workers of a job say, all in threads of this process."""
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir()
    workers = inprocess.workers_of(job, run_dir)
    for worker in workers:
        if poison.stage in worker.modules:
            poison.into(worker.modules[poison.stage], lambda w=worker: w.step)
    return [record["warning"] for record in inprocess.courses(workers) if "warning" in record]


def poisoned_by_reference(job: Job, weights: dict[str, torch.Tensor], poison: Poison) -> list[str]:
    told: list[str] = []
    pipeline, step = Pipeline(job, weights, warn=told.append), 0
    poison.into(pipeline.stages[poison.stage].modules[0], lambda: step)
    for first, count in pipeline.stretches():
        for _ in pipeline.train(first, count):
            step += 1
    pipeline.check_weights()
    return told


def one_of(plan: Plan, kind: str, rng: random.Random) -> tuple[int, int, int]:
    """A stage that has one device, a micro-batch of it, and that one's first sample."""
    alone = [s for s, stage in enumerate(plan.stages) if len(stage.devices) == 1]
    # The gradient of a first stage's own outputs is the second stage's.
    stage = rng.choice(alone)
    microbatch = rng.randrange(MINIBATCH // plan.stages[stage].microbatch_size)
    return stage, microbatch, microbatch * plan.stages[stage].microbatch_size


@pytest.mark.parametrize("engine", thinned(["distributed", "reference"]))
@pytest.mark.parametrize("kind", ["forward", "gradient"])
@pytest.mark.parametrize(
    ("seed", "discards"), [(0, False), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, False), (0, True)))]
)
def test_the_origin_is_found(engine: str, kind: str, seed: int, discards: bool, tmp_path: Path) -> None:
    rng = random.Random(f"{kind}{seed}")
    job, weights = random_job("digits", SGD(lr=0.05, momentum=0.9), rng)
    while not any(len(stage.devices) == 1 for stage in job.plan.stages):
        job, weights = random_job("digits", SGD(lr=0.05, momentum=0.9), rng)
    job = replace(job, settings=replace(job.settings, on_nonfinite="warn"))
    if discards:
        job = replace(job, plan=replace(job.plan, stages=tuple(marked(own, recompute=own.ops) for own in job.plan.stages)))
    stage, microbatch, sample = one_of(job.plan, kind, rng)
    poison = Poison(kind, stage, step := rng.randrange(1, 5), sample)
    if engine == "distributed":
        said = poisoned_by_workers(job, tmp_path, weights, poison)
    else:
        said = poisoned_by_reference(job, weights, poison)
    assert len(said) == 1
    if kind == "gradient":
        assert f"in the backward of micro-batch {microbatch} of step {step} on stage {stage}" in said[0]
    else:
        assert f" of step {step}, on stage" in said[0]
        assert f"began in the forward of micro-batch {microbatch} on stage {stage} " in said[0] or "began there" in said[0]


@pytest.mark.parametrize("engine", thinned(["distributed", "reference"]))
def test_rows_of_the_data_set_are_named(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, weights = random_job("digits", SGD(lr=0.05, momentum=0.9), random.Random(7))
    settings = replace(job.settings, on_nonfinite="warn")
    step, sample = 2, 9
    pixels = digits._read().copy()
    rows = (~digits._held_out(pixels[:, digits.NUM_PIXELS].astype("int64"), 0.2)).nonzero()[0]
    pixels[rows[minibatch(step, MINIBATCH, settings.train_samples, settings.seed)[sample]], 5] = NAN
    monkeypatch.setattr(digits, "_read", lambda: pixels)
    job, poison = replace(job, settings=settings), Poison("none", 0, 0, 0)
    if engine == "distributed":
        (said,) = poisoned_by_workers(job, tmp_path, weights, poison)
    else:
        (said,) = poisoned_by_reference(job, weights, poison)
    reads = next(s for s, stage in enumerate(Pipeline(job, weights).stages) if stage.inputs)
    microbatch = sample // job.plan.stages[reads].microbatch_size
    assert f" of step {step}, on stage" in said
    assert f"began in the forward of micro-batch {microbatch} on stage {reads}, with rows of the data set (" in said


def test_a_gradient_of_the_last_step_is_seen_too(tmp_path: Path) -> None:
    job, weights = random_job("digits", SGD(lr=0.05, momentum=0.9), random.Random(5), one=True)
    last = job.settings.steps - 1
    size = job.plan.stages[0].microbatch_size
    poison = Poison("gradient", 0, last, size)
    for settings in ({"on_nonfinite": "warn"}, {}):
        told = replace(job, settings=replace(job.settings, **settings))
        if settings:
            (said,) = poisoned_by_workers(told, tmp_path / "warn", weights, poison)
            assert f"are not finite after the last step, number {last}" in said
            assert f"in the backward of micro-batch 1 of step {last} on stage 0" in said
        else:
            with pytest.raises(NonFinite, match="after the last step"):
                poisoned_by_workers(told, tmp_path / "stop", weights, poison)
            with pytest.raises(NonFinite, match="after the last step"):
                poisoned_by_reference(told, weights, poison)


def place(step: int, microbatch: int) -> PassPlace:
    return PassPlace(step=step, sample=8 * microbatch, end=8 * microbatch + 8, microbatch=microbatch)


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        ([Finding(stage=2, microbatch=1, made=("loss",))], "began in the forward of micro-batch 1 on stage 2 (loss)"),
        (
            [Finding(stage=2, microbatch=1, received=("h",), made=("loss",)), Finding(stage=0, microbatch=3, made=("h",))],
            "began in the forward of micro-batch 3 on stage 0 (h)",
        ),
        (
            [
                Finding(stage=2, microbatch=1, received=("h",), made=("loss",)),
                Finding(stage=0, microbatch=3, rows=("x",), made=("h",)),
            ],
            "on stage 0, with rows of the data set (x)",
        ),
        # The frozen stage before it keeps nothing.
        ([Finding(stage=2, microbatch=1, received=("h",), made=("loss",))], "came to stage 2 with h, from a stage that keeps"),
        # The stage before it has let go of it: it has none of it itself. Of two micro-batches nobody knows which one it was.
        (
            [Finding(stage=2, microbatch=1, received=("h",), made=("loss",)), Finding(stage=0, microbatch=3, gone=("g", "h"))],
            "began in the forward of micro-batch 3 on stage 0 (h)",
        ),
        (
            [Finding(stage=2, microbatch=1, received=("h",)), *(Finding(stage=0, microbatch=m, gone=("h",)) for m in (2, 3))],
            "came to stage 2 with h, from a stage that keeps",
        ),
        # Gradients run backwards: stage 1 had it before stage 0.
        (
            [Finding(stage=0, weights=("a", "b"), made=("h",)), Finding(stage=1, weights=("c",)), Finding(stage=2)],
            "the weights of stage 1 (c) were not finite any more: its gradient or update before step 7",
        ),
        (
            [Finding(stage=0, weights=("a",), backward=place(6, 1)), Finding(stage=1, weights=("c",), backward=place(6, 1))],
            "in the backward of micro-batch 1 of step 6 on stage 1",
        ),
        # What came of it, as another replica went on: no cause.
        (
            [Finding(stage=2, microbatch=1, made=("loss",)), Finding(stage=0, backward=place(7, 1))],
            "in the forward of micro-batch 1",
        ),
        ([Finding(stage=1)], "where it began is not known"),
    ],
)
def test_the_first_of_several_findings(findings: list[Finding], says: str) -> None:
    seen = Seen(name="loss:caption", value=NAN, stage=2, place=place(7, 1))
    text = told(seen, findings)
    assert text.startswith("the loss term caption of micro-batch 1 of step 7, on stage 2, is not finite (nan): ")
    assert says in text
    assert told(seen, findings, silent=(3, 5)) == f"{text}; ranks 3, 5 have not said what they hold"


def test_weights_of_the_first_step_are_said_to_be_the_initial_ones() -> None:
    seen = Seen(name="loss", value=NAN, stage=2, place=place(7, 1))
    assert "were not finite when the run began" in told(seen, [Finding(stage=1, weights=("c",))], first_step=7)


def test_a_probe_looks_at_the_first_small_gradient_and_remembers_the_last_ones() -> None:
    large, small = torch.zeros(5000), torch.zeros(3)
    assert Probes([large, small, small.clone()], last=2).index == 1
    assert Probes([large, torch.zeros(6000)], last=2).index == 0
    assert Probes([], last=2).index is None
    probes = Probes([small], last=2)
    for step, value in ((0, NAN), (1, 1.0), (2, float("inf"))):
        probes.note(place(step, 0), torch.tensor([value, 1.0]))
    probes.note(place(3, 0), None)
    assert probes.first() == place(2, 0)


def test_an_engine_of_others_says_step_and_micro_batch(tmp_path: Path) -> None:
    job, weights = random_job("digits", Adam(lr=1e300), random.Random(4), one=True)
    job.save(tmp_path, weights)
    (tmp_path / "ranks").mkdir()
    harness = Harness(job, tmp_path, rank=0, device_id=0, device=torch.device("cpu"))
    with pytest.raises(NonFinite, match=r"the loss of micro-batch 0 of step 1, on stage 0, is not finite \((nan|inf)\)"):
        harness.run(WholeModel(harness, world=1))
    assert not torch.autograd._profiler_enabled(), "nobody listens to the allocator any more"


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["distributed", pytest.param("reference", marks=pytest.mark.long)])
def test_a_run_that_diverges_has_failed(engine: str, tmp_path: Path) -> None:
    words = ["model=digits", *inprocess.few_layers("digits"), "logger=none", "cost=analytical", "cluster.num_devices=2"]
    words += ["minibatch_size=48", "microbatch_size=8", "strategy.planner.replication=false"]
    words += ["steps=9", "optimizer.lr=1e30", f"engine={engine}"]
    done = run(tmp_path / "stop", *words)
    assert done.code == 1
    assert done.result["status"] == "failed"
    reason = " ".join(done.result["reason"].split())
    assert "of step 1, on stage" in reason and "is not finite" in reason and "it began in the forward of micro-batch 0" in reason
    assert reason in " ".join(done.out.split())
    refused = run(tmp_path / "refused", *words, "on_nonfinite=maybe")
    assert refused.code == 2 and "on_nonfinite=maybe: must be one of stop, warn, trace" in " ".join(refused.out.split())
    if engine == "distributed":
        return
    going_on = run(tmp_path / "warn", *words, "on_nonfinite=warn")
    assert going_on.code == 0 and len(going_on.result["loss"]) == 9
    assert reason.partition(": ")[2] in " ".join(going_on.out.split())
