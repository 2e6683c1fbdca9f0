"""A training goes on from its checkpoints: bit for bit under the same plan, to 1e-9 under any other."""

import errno
import json
import os
import random
import resource
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from baselines.harness import Harness
from baselines.whole_model_worker import WholeModel
from gpp.errors import Exhausted, InvalidConfig
from gpp.loggers.base import RunInfo
from gpp.loggers.jsonl import JsonlRecord
from gpp.optimizers import SGD, Adam, LearningRate, NAdam, RMSprop
from gpp.runtime.checkpoint.final import finish_final, load_final
from gpp.runtime.checkpoint.manifest import Manifest
from gpp.runtime.checkpoint.moves import owned_names
from gpp.runtime.checkpoint.resume import Checkpoints, FoundCheckpoint, drop_halves, find, training_of
from gpp.runtime.checkpoint.state import Slices
from gpp.runtime.job import Job
from gpp.runtime.run_dir import EARLIER, RunDir, RunIdentity, steps_in
from gpp.serialization import from_json
from tests.support import inprocess
from tests.support.checkpoints import STEPS, Rank, made, random_job

RATE = LearningRate(shape="cosine", warmup_steps=2)


def train(
    job: Job, run_dir: Path, weights: Mapping[str, torch.Tensor], checkpoint: Checkpoints, resumed: FoundCheckpoint | None = None
) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The whole of every worker's run, one thread a worker: loss of each step, final parameters and buffers."""
    job = replace(job, settings=replace(job.settings, **checkpoint.settings(resumed), timeout_s=60.0))
    job.save(run_dir, weights)
    (run_dir / "ranks").mkdir(exist_ok=True)
    workers, losses = inprocess.workers_of(job, run_dir), dict[int, float]()
    for record in inprocess.courses(workers):
        losses[record["step"]] = losses.get(record["step"], 0.0) + record.get("loss", 0.0)
    state = {name: t for w in reversed(workers) for module in w.modules.values() for name, t in module.state_dict().items()}
    return losses, state


@pytest.mark.parametrize(
    ("name", "seed", "overrides"),
    [
        ("digits", 0, ()),
        pytest.param("gpt_small", 2, ("model.dropout=0.1",), marks=pytest.mark.long),
        pytest.param("dlrm_small", 3, (), marks=pytest.mark.long),
        pytest.param(
            "vgg_small", 5, ("model.norm=batch",), marks=pytest.mark.long
        ),  # in suite: tests/mechanisms/marks/test_keeper.py
        pytest.param("llava_small", 6, ("model.frozen=towers",), marks=pytest.mark.long),
    ],
)
def test_goes_on_under_the_same_plan_and_under_others(name: str, seed: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    rng = random.Random(f"{name}{seed}")
    adaptive = [Adam(lr=1e-3, learning_rate=RATE, clip_norm=0.5), Adam(lr=1e-3), RMSprop(lr=1e-3, momentum=0.5)]
    optimizer = rng.choice([SGD(lr=0.05, momentum=0.9, learning_rate=RATE), *adaptive])
    # Threads share one generator of random numbers, processes do not.
    job, weights = random_job(name, optimizer, rng, *overrides, one="model.dropout=0.1" in overrides)
    losses, state = train(job, tmp_path / "a", weights, Checkpoints(every=3))
    assert sorted(step for step, _ in steps_in(tmp_path / "a")) == [3, 6]
    found = find(tmp_path / "a", STEPS)
    assert found.manifest.step == 3
    _saved_once(found.folder, job)

    again, same = train(job, tmp_path / "b", weights, Checkpoints(), found)
    assert again == {step: losses[step] for step in (3, 4, 5)}
    assert all(torch.equal(same[key], state[key]) for key in state)

    if not overrides:
        # Dropout draws by micro-batch and device, batch norm sees micro-batches: other plans train otherwise.
        other, _ = random_job(name, optimizer, rng)
        moved, there = train(other, tmp_path / "c", weights, Checkpoints(), found)
        assert moved == pytest.approx({step: losses[step] for step in (3, 4, 5)}, abs=1e-9)
        for key in state:
            torch.testing.assert_close(there[key], state[key], rtol=0, atol=1e-8)


def test_state_of_another_type_than_its_parameter_comes_back_as_it_was(tmp_path: Path) -> None:
    """NAdam has a float32 product of factors beside float64 weights."""
    job, weights = random_job("digits", NAdam(lr=1e-3), random.Random("nadam"))
    losses, state = train(job, tmp_path / "a", weights, Checkpoints(every=3))
    again, same = train(job, tmp_path / "b", weights, Checkpoints(), find(tmp_path / "a", STEPS))
    assert again == {step: losses[step] for step in (3, 4, 5)}
    assert all(torch.equal(same[key], state[key]) for key in state)


def _saved_once(folder: Path, job: Job) -> None:
    """Every parameter and its state in exactly one file, and nothing in the folder but safetensors and JSON."""
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    assert len(names) == len(set(names))
    params = job.captured.graph.param_of
    assert {name for name in names if name.startswith("weights.")} >= {f"weights.{name}" for name in params}
    trained = {name.removeprefix("optimizer.").rpartition(".")[0] for name in names if name.startswith("optimizer.")}
    assert trained == {name for name, param in params.items() if param.trainable}


def test_a_rank_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, weights = random_job("dlrm_small", Adam(lr=1e-3), random.Random(11))
    train(job, tmp_path, weights, Checkpoints(every=3))
    read: list[str] = []
    original = Slices.__getitem__
    monkeypatch.setattr(Slices, "__getitem__", lambda stored, name: read.append(name) or original(stored, name))
    resumed = replace(job, settings=replace(job.settings, **Checkpoints().settings(find(tmp_path, STEPS))))
    resumed.save(tmp_path / "resumed", weights)
    for worker in inprocess.workers_of(resumed, tmp_path / "resumed"):
        read.clear()
        worker.checkpoints.restore()
        keys = {*read}
        assert {key for key in keys if key.startswith("weights.")} >= {f"weights.{name}" for name in worker.params}
        held = {*worker.params, *(name for module in worker.modules.values() for name, _ in module.named_buffers())}
        mine = {f"weights.{name}" for name in held} | {
            f"optimizer.{n}.{s}" for n in held for s in ("step", "exp_avg", "exp_avg_sq")
        }
        assert keys <= mine


def test_one_device_and_stages_go_on_from_each_other(tmp_path: Path) -> None:
    job, weights = random_job("digits", Adam(lr=1e-3), random.Random(3))
    losses, state = train(job, tmp_path / "stages", weights, Checkpoints(every=3))
    whole_job, _ = random_job("digits", Adam(lr=1e-3), random.Random(4), one=True)

    def single(
        name: str, checkpoint: Checkpoints, resumed: FoundCheckpoint | None = None
    ) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
        run_dir = tmp_path / name
        alone = replace(whole_job, settings=replace(whole_job.settings, **checkpoint.settings(resumed)))
        alone.save(run_dir, weights)
        (run_dir / "ranks").mkdir()
        harness = Harness(alone, run_dir, rank=0, device_id=0, device=torch.device("cpu"))
        harness.run(WholeModel(harness, world=1))
        finish_final(alone, run_dir)
        records = [json.loads(line) for line in (run_dir / "ranks" / "rank_0.jsonl").read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records}, load_final(run_dir)

    whole, final = single("single", Checkpoints(every=3))
    again, same = single("again", Checkpoints(), find(tmp_path / "single", STEPS))
    assert again == {step: whole[step] for step in (3, 4, 5)}
    assert all(torch.equal(same[key], final[key]) for key in final)
    from_stages, _ = single("from_stages", Checkpoints(), find(tmp_path / "stages", STEPS))
    assert from_stages == pytest.approx({step: losses[step] for step in (3, 4, 5)}, abs=1e-9)
    from_single, there = train(job, tmp_path / "from_single", weights, Checkpoints(), find(tmp_path / "single", STEPS))
    assert from_single == pytest.approx({step: losses[step] for step in (3, 4, 5)}, abs=1e-9)
    for key in state:
        torch.testing.assert_close(there[key], state[key], rtol=0, atol=1e-8)


def test_a_checkpoint_is_whole_only_when_every_rank_has_written(tmp_path: Path) -> None:
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    first.save(1)
    first.value += 1.0  # the copy was made before
    waiting = threading.Thread(target=first.save, args=(2,))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()  # one at a time
    assert not steps_in(tmp_path)
    with pytest.raises(InvalidConfig, match="no whole checkpoint"):
        find(tmp_path, STEPS)
    second.save(1)
    waiting.join(30)
    assert [step for step, _ in steps_in(tmp_path)] == [1]
    with safe_open(find(tmp_path, STEPS).folder / "rank_0.safetensors", framework="pt") as file:
        assert file.get_tensor("weights.tensor_0").tolist() == [0.0, 0.0, 0.0]
    second.save(2)
    for rank in (first, second):
        rank.wait()
    assert find(tmp_path, STEPS).manifest.step == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank, keep=3) for rank in (0, 1)]
    for done in range(1, 13):
        for rank in ranks:
            rank.save(done)
    for rank in ranks:
        rank.wait()
    assert sorted(step for step, _ in steps_in(tmp_path)) == [10, 11, 12]


def test_a_full_disk_stops_the_run_with_what_it_is_and_what_helps(tmp_path: Path) -> None:
    """Here the limit on the size of a file, which the kernel refuses in the same way."""
    rank, limits = Rank(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        rank.save(1)
        with pytest.raises(Exhausted, match=r"could not be written below .*checkpoints: File too large.*ulimit -f"):
            rank.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space", "/a/b"), "No space left on device (/a/b). Fix: free some space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left on device. Fix: free some space"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
            "Cannot allocate memory. Fix: use a",
        ),
        (MemoryError(), "Cannot allocate memory. Fix: use a smaller"),
        (OSError(errno.EMFILE, "Too many"), "Too many open files. Fix: raise the limit on open files (ulimit -n)"),
        (RuntimeError("can't start new thread"), "Resource temporarily unavailable. Fix: raise the limit on processes"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable. Fix: raise the limit on"),
        (RuntimeError(f"read: {os.strerror(errno.EAGAIN)}"), None),
        (RuntimeError("Could not determine home directory."), "Could not determine home directory. Fix: set HOME"),
        (OSError("the disk with the samples is gone"), None),
        (OSError(errno.ENOENT, "No such file", "/a"), None),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found in ['/tmp']. Fix: set TMPDIR",
        ),
        (ValueError("(os error 2)"), None),
    ],
)
def test_what_the_machine_refuses_is_told_from_defects(error: Exception, says: str | None) -> None:
    around = RuntimeError("while writing")
    around.__cause__ = error
    for raised in (error, around):
        found = Exhausted.of(raised)
        assert found is None if says is None else str(found).startswith(says)


def test_what_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    rank.save(1)
    with pytest.raises(RuntimeError, match="could not be written"):
        rank.save(2)


def test_damaged_and_finished_ones_are_passed_over_and_said(tmp_path: Path) -> None:
    made(tmp_path, 1)
    last = made(tmp_path, 2)
    (last / "rank_1.safetensors").write_bytes(b"half")
    found = find(tmp_path, STEPS)
    assert found.manifest.step == 1 and [str(last) in damage for damage in found.damaged] == [True]
    assert f"{last} is damaged: rank_1.safetensors has 4 bytes" in found.warnings(STEPS, LearningRate())[0]
    with pytest.raises(InvalidConfig, match="steps=1: counts all steps"):
        find(tmp_path, 1)
    ended = find(made(tmp_path, 3).parent.parent, 3)
    assert (ended.manifest.step, ended.ended) == (1, tmp_path / "checkpoints" / "step_3")
    assert "more steps train on" in ended.warnings(3, LearningRate())[-1]
    assert "decays over steps=9" in ended.warnings(9, RATE)[-1]


def begun(run_dir: Path, resume: Path | None = None) -> RunIdentity:
    """A run that has begun in a directory, and ended at once."""
    with RunDir(run_dir) as directory:
        directory.claim(resume, from_json(Manifest, (resume / "checkpoint.json").read_text()).step if resume else 0)
        directory.begin()
        assert directory.run is not None
        return directory.run


def test_a_run_without_a_checkpoint_hands_on_what_it_went_on_from(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", 2)
    begun(tmp_path / "b", folder)
    begun(tmp_path / "c", find(tmp_path / "b", STEPS).folder)
    assert find(tmp_path / "c", STEPS).folder == folder
    assert find(folder, STEPS).folder == folder
    with pytest.raises(InvalidConfig, match="must be a run directory"):
        find(tmp_path / "d", STEPS)


def test_a_run_that_is_killed_while_it_plans_hands_it_on_too(tmp_path: Path) -> None:
    """Also in a directory with another run's checkpoints, which it had not taken over yet."""
    folder = made(tmp_path / "a", 2)
    begun(tmp_path / "old")
    made(tmp_path / "old", 4)
    for name in ("new", "old"):
        directory = RunDir(tmp_path / name)
        directory.claim(folder, 2)
        os.close(directory._handle or 0)  # as its process does when it is killed
        assert find(tmp_path / name, STEPS).folder == folder


def test_checkpoints_of_another_run_are_passed_over(tmp_path: Path) -> None:
    """Nothing but the identity tells them: they may be later, earlier, or of the same step."""
    first = begun(tmp_path / "a")
    made(tmp_path / "a", 2)
    begun(tmp_path / "b")
    for done in (1, 4):
        made(tmp_path / "b", done)
    strange = (tmp_path / "b" / "checkpoints" / "step_4").rename(tmp_path / "a" / "checkpoints" / "step_4")
    found = find(tmp_path / "a", STEPS)
    assert (found.manifest.step, found.manifest.run, found.run, found.others) == (2, first.id, first, (strange,))
    assert f"{strange} is another run's: passed over" in found.warnings(STEPS, LearningRate())
    assert find(strange, STEPS).manifest.step == 4
    begun(tmp_path / "a")
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "b" / "checkpoints" / "step_1").rename(tmp_path / "a" / "checkpoints" / "step_1")
    with pytest.raises(InvalidConfig, match="step_1: another run's") as caught:
        find(tmp_path / "a", STEPS)
    assert "checkpoints/step_1" in caught.value.fix


def test_another_training_is_refused_by_name(tmp_path: Path) -> None:
    job, _ = random_job("digits", SGD(lr=0.1, momentum=0.9), random.Random(0))
    made(tmp_path, 2)
    found, mine = find(tmp_path, STEPS), training_of(job.settings, job.captured)
    found.refuse_another(mine)
    found.refuse_another(replace(mine, model={}, weights=""))
    found.refuse_another(replace(mine, model={**mine.model, "name": "mine", "metric": None}))
    for other, field, fix in [
        ({"dtype": "float32"}, "dtype", "set dtype=float64"),
        ({"minibatch_size": 8}, "minibatch_size", "set minibatch_size=16"),
        ({"seed": 1}, "seed", "set seed=0"),
        ({"train_samples": 10}, "data", "use the same data"),
        ({"optimizer": "gpp.optimizers.Adam"}, "optimizer", "set optimizer=sgd"),
        ({"weights": "1" * 16}, "model", "use that model"),
        ({"model": {**mine.model, "arguments": {**mine.model["arguments"], "hidden": 7}}}, "model.hidden", "set model.hidden=192"),
        ({"model": {**mine.model, "_target_": "gpp.models.imported.Imported"}}, "model", "use that model"),
    ]:
        with pytest.raises(InvalidConfig, match=r"as in the checkpoint|that they have in") as caught:
            found.refuse_another(replace(mine, **other))
        assert caught.value.field == field
        assert fix in caught.value.fix


def test_a_new_run_in_the_same_directory(tmp_path: Path) -> None:
    """What it goes on from stays; what it does not is put aside; halves are dropped; metrics go on."""
    owner = begun(tmp_path)
    for done in (1, 2):
        made(tmp_path, done)
    (tmp_path / "checkpoints" / ".step_3").mkdir()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "loss": 3}\n{"step": 1, "eval": {}}\n{"step": 1, "loss": 2}\n{"step": 2, "eval": {}}\n{"st')
    assert begun(tmp_path, tmp_path / "checkpoints" / "step_1").id == owner.id
    drop_halves(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert find(tmp_path, STEPS).manifest.step == 1
    with JsonlRecord(RunInfo(run_dir=tmp_path, name="test", first_step=1)) as record:
        record.log(1, {"loss": 5.0})
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == [
        {"step": 0, "loss": 3},
        {"step": 1, "eval": {}},
        {"step": 1, "loss": 5.0},
    ]


def test_a_forgotten_resume_costs_nothing_however_often(tmp_path: Path) -> None:
    """Every run that begins anew sets the one before it aside, in a folder of its own that is a run directory."""
    for done in (1, 2, 3):
        begun(tmp_path)
        made(tmp_path, done)
    begun(tmp_path)
    assert not steps_in(tmp_path)
    for number in (1, 2, 3):
        assert find(tmp_path / EARLIER / str(number), STEPS).manifest.step == number
    with pytest.raises(InvalidConfig, match="no whole checkpoint") as caught:
        find(tmp_path, STEPS)
    assert f"resume={tmp_path / EARLIER / '3'}" in caught.value.fix


def test_a_weight_that_stages_share_has_one_owner() -> None:
    job, _ = random_job("gpt_small", SGD(lr=0.1, momentum=0.9), random.Random(1))
    owners: dict[str, list[int]] = {}
    for device in sorted(job.plan.stage_of_device):
        names = {
            name for s in job.plan.stages_of_device[device] for op in job.plan.stages[s].ops for name in job.graph.ops[op].params
        }
        for name in owned_names(job, device, names):
            owners.setdefault(name, []).append(device)
    assert owners.keys() == job.graph.param_of.keys()
    assert all(len(devices) == 1 for devices in owners.values())
