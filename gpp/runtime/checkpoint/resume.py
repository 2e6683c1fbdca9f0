"""Where checkpoints lie, which of them are whole, and whether a run may go on from one. Free of torch.

RUN_DIR/checkpoints/step_N/     whole: a folder gets this name when every rank has written and synced its part
            checkpoint.json     `Manifest`; JSON and safetensors are all that is ever read
            rank_R.safetensors  each tensor once, by full name (see `gpp.runtime.checkpoint.checkpoint`)
        checkpoints/.step_N/    being written, or left by a run that died meanwhile
        checkpoints/earlier/    those of an earlier run that a new one in the same directory does not go on from
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpp.errors import InvalidConfig, InvalidFile
from gpp.graph.captured import Captured
from gpp.models.base import AbstractModel, describe
from gpp.optimizers import AbstractOptimizer, LearningRate
from gpp.serialization import read_json
from gpp.settings import Count, Natural, settings

if TYPE_CHECKING:
    from gpp.plan.plan import Plan
    from gpp.runtime.job import Settings

MANIFEST = "checkpoint.json"
ANEW = "leave resume out to start anew"


@final
@settings("checkpoint")
class Checkpoints:
    """When a run saves checkpoints, and how many it keeps.

    Args:
        every: optimizer steps between two checkpoints, of which the last has one too; 0 for the final weights only.
        keep: how many to keep, the latest ones.
        drain: empty the pipeline before a checkpoint, where it does not drain anyway. Otherwise a checkpoint holds
            every version of the weights that micro-batches in flight have used, and their forwards are repeated by
            whoever goes on from it.
    """

    every: Natural = 0
    keep: Count = 2
    drain: bool = False

    def settings(self, resumed: Found | None) -> dict[str, Any]:
        """Fields of a job's settings: when to save, and which checkpoint to go on from."""
        return {
            "checkpoint_every": self.every,
            "checkpoint_keep": self.keep,
            "checkpoint_drain": self.drain,
            "resume": str(resumed.folder) if resumed else None,
            "first_step": resumed.manifest.step if resumed else 0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Properties of a training that stay the same when it goes on, under whatever plan.

    Args:
        model: its settings; empty for a model in memory.
        weights: hash over names, shapes and types of all parameters and buffers; empty where not known yet.
        train_samples: with `seed` and `minibatch_size` they decide which samples a step sees.
        optimizer: its class.
    """

    model: dict[str, Any]
    weights: str = ""
    dtype: str
    minibatch_size: int
    seed: int
    train_samples: int
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """State of the pipeline at a checkpoint made while micro-batches were in flight.

    Args:
        start: steps done when the pipeline was last empty.
        plan: digest of stages and weight policy; under others what was in flight is forgotten, and the run goes on as
            after a drain.
    """

    start: int
    plan: str


def stream_digest(plan: Plan, weights: dict[str, Any]) -> str:
    """Digest of the stages and the weight policy, which decide the versions of the weights in flight at each stage."""
    shape = [
        [s.ops, len(s.devices), s.microbatch_size, s.in_flight, *(["in turn"] if s.round_robin_degree > 1 else [])]
        for s in plan.stages
    ]
    return hashlib.sha256(json.dumps([shape, plan.edges, plan.minibatch_size, weights]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of checkpoint.json.

    Args:
        step: optimizer steps done; the learning rate and the samples of the next one follow from it.
        epoch, next_sample: the same as a position in the data, for people.
        steps: those that the run was to do, which a decaying learning rate depends on.
        files: size of each file, bytes.
        stream: None where the pipeline was empty.
    """

    format: int = 1
    step: int
    epoch: int
    next_sample: int
    steps: int
    training: Training
    files: dict[str, int]
    stream: Stream | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint to go on from.

    Args:
        damaged: later checkpoints that were passed over, as their files are not as they were written.
        ended: a later checkpoint that leaves nothing to do.
    """

    folder: Path
    manifest: Manifest
    damaged: tuple[Path, ...] = ()
    ended: Path | None = None

    def warnings(self, steps: int, rate: LearningRate) -> list[str]:
        """Warnings for the user of a run that goes on from a checkpoint."""
        out = [f"the checkpoint {folder} is damaged: going on from {self.folder.name}" for folder in self.damaged]
        if self.ended is not None:
            out.append(
                f"{self.ended} has done all of steps={steps}: going on from {self.folder.name} to the same end; more steps train on"
            )
        if rate.shape != "constant" and steps != self.manifest.steps:
            out.append(
                f"the learning rate decays over steps={steps} now, over {self.manifest.steps} in the run that made the checkpoint"
            )
        return out

    def refuse_another(self, now: Training) -> None:
        """Make sure that this run is the checkpoint's training, going on.

        Args:
            now: empty fields are not compared.

        Raises:
            InvalidConfig: names the first setting that differs.
        """
        then, where = self.manifest.training, f"as in the checkpoint {self.folder}"
        for setting in fields(Training):
            mine, theirs = getattr(now, setting.name), getattr(then, setting.name)
            if mine == theirs or mine in ("", {}) or theirs in ("", {}):
                continue
            if setting.name == "model":
                _refuse_model(mine, theirs, where)
            elif setting.name == "weights":
                raise InvalidConfig(
                    "model",
                    mine,
                    f"its parameters must have the names and shapes that they have in {self.folder}",
                    f"use that model, or {ANEW}",
                )
            elif setting.name == "train_samples":
                raise InvalidConfig(
                    "data", f"{mine} training samples", f"must have {theirs}, {where}", f"use the same data, or {ANEW}"
                )
            elif setting.name == "optimizer":
                raise InvalidConfig(
                    setting.name,
                    _last(mine),
                    f"must be {_last(theirs)}, {where}",
                    f"set optimizer={_last(theirs).lower()}, or {ANEW}",
                )
            else:
                raise InvalidConfig(setting.name, mine, f"must be {theirs}, {where}", f"set {setting.name}={theirs}, or {ANEW}")


def training_of(settings: Settings, captured: Captured) -> Training:
    """Properties that a job shares with every job that goes on from its checkpoints."""
    return Training(
        model=settings.model,
        weights=weights_hash(captured),
        dtype=settings.dtype,
        minibatch_size=settings.minibatch_size,
        seed=settings.seed,
        train_samples=settings.train_samples,
        optimizer=settings.optimizer["_target_"],
    )


def uncaptured(
    model: AbstractModel, optimizer: AbstractOptimizer, *, dtype: str, seed: int, minibatch_size: int, train_samples: int
) -> Training:
    """Properties of a training, as far as they are known before the model is captured."""
    return Training(
        model=describe(model),
        dtype=dtype,
        minibatch_size=minibatch_size,
        seed=seed,
        train_samples=train_samples,
        optimizer=describe(optimizer)["_target_"],
    )


def weights_hash(captured: Captured) -> str:
    """Hash over the parameters and buffers of a model; no cut, batch size or version of torch changes it."""
    kinds = ("param", "buffer")
    leaves = sorted({(node.target, tuple(node.shape or ()), node.dtype or "") for node in captured.nodes if node.kind in kinds})
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:16]


def find(resume: str | Path, steps: int) -> Found:
    """The latest whole checkpoint of a run that leaves a step to do, or the very one that is named.

    A run that died before its first checkpoint hands on the one that it had itself gone on from; one that died between
    its last checkpoint and its end, or that has ended, the one before the last.

    Args:
        steps: total of the training.

    Raises:
        InvalidConfig: no such directory; there is no whole checkpoint; there is none before step `steps`.
    """
    path = Path(resume).expanduser().resolve()
    if not path.is_dir():
        raise InvalidConfig("resume", resume, "must be a run directory", "correct the path, or leave resume out")
    named = (path / MANIFEST).is_file()
    damaged: list[Path] = []
    ended, done = None, 0
    for folder in [path] if named else [folder for _, folder in sorted(steps_in(path), reverse=True)]:
        manifest = _whole(folder)
        if manifest is None:
            damaged.append(folder)
        elif manifest.step >= steps:
            ended, done = folder, manifest.step
        else:
            return Found(folder=folder, manifest=manifest, damaged=tuple(damaged), ended=ended)
    if ended is not None:
        raise InvalidConfig(
            "steps", steps, f"counts all steps of the training, of which {ended} has done {done}", f"set steps={done + 100}"
        )
    before = _gone_on_from(path)
    if before is not None and before != path and before.is_dir():
        return find(before, steps)
    rule = "has no whole checkpoint" + (f"; damaged: {', '.join(folder.name for folder in damaged)}" if damaged else "")
    raise InvalidConfig("resume", resume, rule, "name a run that had checkpoint.every above 0, or leave resume out")


def steps_in(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every finished checkpoint of a run, in no order."""
    found = (run_dir / "checkpoints").glob("step_*")
    return [(int(path.name[5:]), path) for path in found if path.name[5:].isdigit() and path.is_dir()]


def _whole(folder: Path) -> Manifest | None:
    try:
        manifest = read_json(Manifest, folder / MANIFEST)
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except (OSError, InvalidFile):
        return None
    # Names from a file never lead out of its folder.
    return manifest if sizes == manifest.files and all(Path(name).name == name for name in sizes) else None


def _gone_on_from(run_dir: Path) -> Path | None:
    try:
        resume = json.loads((run_dir / "job" / "settings.json").read_text()).get("resume")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(resume) if isinstance(resume, str) else None


def _refuse_model(mine: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    if mine.get("_target_") != theirs.get("_target_"):
        raise InvalidConfig(
            "model",
            _last(str(mine.get("_target_"))),
            f"must be {_last(str(theirs.get('_target_')))}, {where}",
            f"use that model, or {ANEW}",
        )
    # The arguments of a network are settings of the model to a user.
    mine, theirs = mine | mine.get("arguments", {}), theirs | theirs.get("arguments", {})
    # What a model is called and which metric is reported changes nothing in its training.
    for key in sorted((mine.keys() | theirs.keys()) - {"_target_", "source", "name", "metric", "arguments"}):
        if mine.get(key) != theirs.get(key):
            raise InvalidConfig(
                f"model.{key}",
                mine.get(key),
                f"must be {theirs.get(key)}, {where}",
                f"set model.{key}={theirs.get(key)}, or {ANEW}",
            )


def _last(target: str) -> str:
    return target.rpartition(".")[2]


def make_room(run_dir: Path, first_step: int) -> None:
    """Before workers start: drop half-written checkpoints, put those that this run does not go on from aside."""
    folder = run_dir / "checkpoints"
    for partial in folder.glob(".step_*"):
        shutil.rmtree(partial)
    others = [path for step, path in steps_in(run_dir) if step > first_step or first_step == 0]
    if others:
        aside = folder / "earlier"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in others:
            path.rename(aside / path.name)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the latest `keep` checkpoints; a half-removed checkpoint no longer looks whole."""
    for _, path in sorted(steps_in(run_dir))[:-keep]:
        doomed = path.with_name(f".{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
