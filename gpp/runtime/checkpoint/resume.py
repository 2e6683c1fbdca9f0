"""Where checkpoints lie, which of them are whole, and whether a run may go on from one. Free of torch.

RUN_DIR/checkpoints/step_N/     whole: a folder gets this name when every rank has written and synced its part
            checkpoint.json     `gpp.runtime.checkpoint.manifest`; JSON and safetensors are all that is ever read
            rank_R.safetensors  each tensor once, by full name (see `gpp.runtime.checkpoint.checkpoint`)
        checkpoints/.step_N/    being written, or left by a run that died meanwhile
        earlier/N/checkpoints/  those of an earlier run that a new one in the same directory does not go on from

A checkpoint belongs to the run that its manifest names; `gpp.runtime.run_dir` says which run a directory is of.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gpp.errors import InvalidConfig, readable
from gpp.graph.captured import Captured
from gpp.models.base import AbstractModel, describe
from gpp.optimizers import AbstractOptimizer, LearningRate
from gpp.private import apart
from gpp.runtime.checkpoint.final import UNDER_WAY
from gpp.runtime.checkpoint.manifest import MANIFEST, TENSORS, Manifest, Training, check_marks, read_manifest
from gpp.runtime.nonfinite import shown
from gpp.runtime.run_dir import CHECKPOINTS, EARLIER, RunIdentity, run_of, steps_in, under_way
from gpp.settings import Count, Natural, settings

if TYPE_CHECKING:
    from gpp.plan.plan import Plan
    from gpp.runtime.job import Settings

ANEW = "leave resume out to start anew"

AUTO = "auto"
"""The setting `resume` of a run that goes on from its own directory's checkpoints, and begins where there are none."""


@final
@settings("checkpoint")
class Checkpoints:
    """The rule by which a run saves checkpoints, and how many it keeps.

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

    def settings(self, resumed: FoundCheckpoint | None) -> dict[str, Any]:
        """Fields of a job's settings: when to save, and which checkpoint to go on from."""
        return {
            "checkpoint_every": self.every,
            "checkpoint_keep": self.keep,
            "checkpoint_drain": self.drain,
            "resume": str(resumed.folder) if resumed else None,
            "first_step": resumed.manifest.step if resumed else 0,
        }


def stream_digest(plan: Plan, weights: dict[str, Any]) -> str:
    """Digest of the stages and the weight policy, which decide the versions of the weights in flight at each stage."""
    shape = [[s.ops, len(s.devices), s.microbatch_size, s.in_flight, *filter(None, [s.dealt])] for s in plan.stages]
    return hashlib.sha256(json.dumps([shape, plan.edges, plan.minibatch_size, weights]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint to go on from.

    Args:
        run: the run that wrote it, if its directory says so.
        damaged: of later checkpoints that were passed over: which, and what is wrong with it.
        others: checkpoints of other runs in the directory, passed over likewise.
        ended: a later checkpoint that leaves nothing to do.
    """

    folder: Path
    manifest: Manifest
    run: RunIdentity | None = None
    damaged: tuple[str, ...] = ()
    others: tuple[Path, ...] = ()
    ended: Path | None = None

    @property
    def words(self) -> str:
        """Which run this is, for people: `resume=outputs/latest` may mean another one than they think."""
        started = f" (started {self.run.started})" if self.run else ""
        return f"going on from {self.folder.parent.parent}{started}, step {self.manifest.step}"

    def warnings(self, steps: int, rate: LearningRate) -> list[str]:
        """Warnings for the user of a run that goes on from a checkpoint."""
        out = [f"{folder} is another run's: passed over" for folder in self.others]
        out += [f"{damage}; going on from {self.folder}" for damage in self.damaged]
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
                continue  # names and metrics may differ
            same, last = f"its parameters must have the names and shapes that they have in {self.folder}", _last(str(theirs))
            known = {
                "weights": ("model", mine, same, "use that model"),
                "train_samples": ("data", f"{mine} training samples", f"must have {theirs}, {where}", "use the same data"),
                "optimizer": ("optimizer", _last(str(mine)), f"must be {last}, {where}", f"set optimizer={last.lower()}"),
            }
            usual = setting.name, mine, f"must be {theirs}, {where}", f"set {setting.name}={theirs}"
            field, value, rule, fix = known.get(setting.name, usual)
            raise InvalidConfig(field, value, rule, f"{fix}, or {ANEW}")


def training_of(settings: Settings, captured: Captured) -> Training:
    """Properties that a job shares with every job that goes on from its checkpoints.

    `weights` is a hash over the parameters and buffers of the model: no cut, batch size or version of torch changes it.
    """
    kinds = ("param", "buffer")
    leaves = sorted({(node.target, tuple(node.shape or ()), node.dtype or "") for node in captured.nodes if node.kind in kinds})
    return Training(
        model=apart(settings.model),
        weights=hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:16],
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
        model=apart(describe(model)),
        dtype=dtype,
        minibatch_size=minibatch_size,
        seed=seed,
        train_samples=train_samples,
        optimizer=describe(optimizer)["_target_"],
    )


def find(resume: str | Path, steps: int) -> FoundCheckpoint:
    """The latest whole checkpoint of a run that leaves a step to do, or the very one that is named.

    A run that died before its first checkpoint hands on the one that it had itself gone on from; one that died between
    its last checkpoint and its end, or that has ended, the one before the last. A directory's run decides: checkpoints
    that others left there are passed over. Every byte of the one that is found has been compared with its digest; damaged
    ones are passed over, and `FoundCheckpoint` says so.

    Args:
        steps: total of the training.

    Raises:
        InvalidConfig: no such directory; there is no whole checkpoint (the message has what is wrong with each); there
            is none before step `steps`.
    """
    path = source = _folder(resume)
    if path is None:
        raise InvalidConfig("resume", resume, "must be a run directory", "correct the path, or leave resume out")
    damaged: list[str] = []
    others: list[Path] = []
    seen: set[Path] = set()
    ended: tuple[int, Path] | None = None
    while source is not None and source not in seen:
        seen.add(source)
        with readable("resume", resume):
            owner, folders, before = _contents(source, others)
        for folder in folders:
            manifest = _whole(folder, steps)
            if isinstance(manifest, str):
                damaged.append(f"the checkpoint {folder} is damaged: {manifest}")
            elif folder != source and owner is not None and manifest.run != owner.id:
                others.append(folder)
            elif manifest.step >= steps:
                ended = manifest.step, folder
            else:
                return FoundCheckpoint(
                    folder=folder,
                    manifest=manifest,
                    run=owner,
                    damaged=tuple(damaged),
                    others=tuple(others),
                    ended=ended[1] if ended else None,
                )
        # Only where the one before the last is damaged does a training that has ended go further back.
        source = None if ended and not damaged else before
    if ended is not None:
        rule = f"counts all steps of the training, of which {ended[1]} has done {ended[0]}"
        raise InvalidConfig("steps", steps, "; ".join([rule, *damaged]), f"set steps={ended[0] + 100}")
    raise _nothing(resume, path, damaged, others)


def continues(run_dir: Path) -> bool:
    """Whether a directory's run can go on: it has checkpoints, or had itself gone on from one.

    A damaged checkpoint counts: the run refuses to go on from it, and trains nothing anew over it.
    """
    runs = (run_of(run_dir), under_way(run_dir))
    return bool(steps_in(run_dir)) or any(run is not None and run.resume is not None for run in runs)


def _contents(path: Path, others: list[Path]) -> tuple[RunIdentity | None, list[Path], Path | None]:
    """The run whose files are in a directory, its checkpoints, the latest first, and what it had gone on from itself.

    A directory that is a checkpoint contains itself.

    Args:
        others: checkpoints of another run are added here.
    """
    if (path / MANIFEST).is_file() or (path.parent.name == CHECKPOINTS and path.name.startswith("step_")):
        return run_of(path.parent.parent), [path], None
    owner, last = run_of(path), under_way(path)
    folders, before = [folder for _, folder in sorted(steps_in(path), reverse=True)], owner.resume if owner else None
    if last is not None and last.resume and (owner is None or owner.id != last.id):
        # It was killed while it planned: the checkpoints here are those of the run before it.
        others += folders
        folders, before = [], last.resume
    if before is None:
        return owner, folders, None
    # Where that checkpoint was removed, its run may have others.
    return owner, folders, _folder(before) or _folder(Path(before).parent.parent)


def _nothing(resume: str | Path, path: Path, damaged: list[str], others: list[Path]) -> InvalidConfig:
    """The error for a directory without a checkpoint to go on from; it names those that lie nearby."""
    rule = "; ".join(["has no whole checkpoint", *damaged])
    aside = [folder.parent.parent for folder in sorted(path.glob(f"{EARLIER}/*/{CHECKPOINTS}/step_*"))]
    if others:
        rule += f"; {', '.join(folder.name for folder in others)}: another run's"
        return InvalidConfig("resume", resume, rule, f"set resume={others[0]} if that is the one, or leave resume out")
    if aside:
        return InvalidConfig("resume", resume, rule, f"set resume={aside[-1]} for the run before it, or leave resume out")
    return InvalidConfig("resume", resume, rule, "name a run that had checkpoint.every above 0, or leave resume out")


def _folder(path: str | Path) -> Path | None:
    """An existing folder, absolute; None for any other path, or for what can be none."""
    try:
        found = Path(path).expanduser().resolve()
        return found if found.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _whole(folder: Path, steps: int) -> Manifest | str:
    """The manifest of a checkpoint that a run may go on from; else what is wrong with it.

    The files of one that leaves nothing to do before step `steps` are not read.
    """
    manifest = read_manifest(folder)
    if isinstance(manifest, str) or manifest.step >= steps:
        return manifest
    if manifest.nonfinite:
        return f"it holds weights that are not finite ({shown(manifest.nonfinite)})"
    return check_marks(folder, manifest.files, TENSORS, MANIFEST) or manifest


def _refuse_model(mine: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    now, then = (_last(str(model.get("_target_"))) for model in (mine, theirs))
    if mine.get("_target_") != theirs.get("_target_"):
        raise InvalidConfig("model", now, f"must be {then}, {where}", f"use that model, or {ANEW}")
    # The arguments of a network are settings of the model to a user.
    mine, theirs = mine | mine.get("arguments", {}), theirs | theirs.get("arguments", {})
    # What a model is called, where its operators are found and which metric is reported changes nothing in its training.
    for key in sorted((mine.keys() | theirs.keys()) - {"_target_", "source", "name", "metric", "imports", "arguments"}):
        if (was := theirs.get(key)) != mine.get(key):
            fix = f"set model.{key}={was}, or {ANEW}"
            raise InvalidConfig(f"model.{key}", mine.get(key), f"must be {was}, {where}", fix)


def _last(target: str) -> str:
    return target.rpartition(".")[2]


def drop_halves(run_dir: Path) -> None:
    """Before workers start: remove checkpoints and final weights that an earlier run did not write to their end."""
    shutil.rmtree(run_dir / CHECKPOINTS / UNDER_WAY, ignore_errors=True)
    for half in (run_dir / CHECKPOINTS).glob(".step_*"):
        shutil.rmtree(half)


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the latest `keep` checkpoints; a half-removed checkpoint no longer looks whole."""
    for _, path in sorted(steps_in(run_dir))[:-keep]:
        doomed = path.with_name(f".{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
