"""Checkpoints of a training, by full parameter name and without pickles.

    weights.NAME              parameter or buffer
    optimizer.NAME.SLOT       the optimizer's state of a parameter, as in `optimizer.head.weight.exp_avg`

    history.KEY.NAME          weights that a micro-batch in flight has used, or a version that one will use; see
                              `gpp.runtime.worker.around`

The folder has safetensors files with whole tensors, as `HuggingFaceStorageReader` of torch.distributed.checkpoint (DCP) reads
them, so any rank of any plan reads just the tensors that it holds. None of DCP's planning is needed: a plan is static, so every
rank knows what it saves, and no message is exchanged. DCP's own safetensors writer serialises under the interpreter's lock, which
holds the training up; `save_file` of safetensors does not.

How a checkpoint comes about (`gpp.runtime.checkpoint.resume` says how it lies on disk):

1. between two steps every rank copies what it saves to main memory;
2. a thread writes the copy into the folder `.step_N`, syncs it, and leaves a note of its length and digest;
3. the first rank waits for all notes, writes checkpoint.json, syncs, and renames the folder to `step_N`.

Killed at any instant, a run leaves either the new folder under its final name or only the earlier ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpp.data.sampler import position
from gpp.errors import Exhausted, GppError, InvalidConfig, NonFinite
from gpp.files import complete, write_tensors, write_text
from gpp.runtime.checkpoint.manifest import MANIFEST, Manifest, Mark, PipelineState, read_manifest, sealed
from gpp.runtime.checkpoint.resume import prune, stream_digest, training_of
from gpp.runtime.checkpoint.state import Slices, SplitWeights
from gpp.runtime.job import Job
from gpp.runtime.nonfinite import nonfinite, shown
from gpp.runtime.run_dir import run_of
from gpp.serialization import from_json, to_json

WEIGHTS, OPTIMIZER, HISTORY = "weights.", "optimizer.", "history."
POLL_S = 0.01
AGAIN = "give the same command again, which looks for the latest whole checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank tells the first one of its part of a checkpoint; the fields are those of `Manifest`."""

    files: dict[str, Mark]
    nonfinite: tuple[str, ...]


class Checkpointer:
    """One rank's share of every checkpoint of a run.

    Args:
        rank, world: this process and how many take part; every one of them saves at the same steps.
        weights: all parameters and buffers that the rank holds, by full name.
        optimizers: each trained parameter is in one of them.
        owned: names that this rank saves; the others are another rank's to save.
        split: which weights are shares; they are put together to be saved, so a run may go on under another plan.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        *,
        rank: int,
        world: int,
        weights: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        owned: frozenset[str],
        split: SplitWeights | None = None,
    ) -> None:
        self._job, self._settings, self._root = job, job.settings, run_dir / "checkpoints"
        self._rank, self._world = rank, world
        self._weights, self._optimizers, self._owned = weights, optimizers, owned
        self._split = split or SplitWeights({})
        self._copy: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def due(self, done: int) -> bool:
        """Whether a checkpoint follows after `done` steps."""
        every = self._settings.checkpoint_every
        return every > 0 and (done % every == 0 or done == self._settings.steps)

    def restore(self, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Go on from what another plan's workers held; None: from the checkpoint that the job names, if any.

        Args:
            state: as `held` gives it; tensors that this rank does not hold are ignored.

        Raises:
            InvalidConfig: a parameter is not in the checkpoint; a file cannot be read.
        """
        if state is not None:
            self._go_on(state, "memory")
        elif self._settings.resume is not None:
            with _opened(Path(self._settings.resume)) as stored:
                self._go_on(stored, self._settings.resume)

    def _go_on(self, stored: Mapping[str, torch.Tensor], source: str) -> None:
        """Fill the rank's weights and the state of its optimizers; no other tensor is read.

        Args:
            stored: what there is, by the names of a checkpoint.
            source: where it is, for errors.
        """
        for name, tensor in self._weights.items():
            if (value := stored.get(WEIGHTS + name)) is not None:
                tensor.detach().copy_(self._own(name, value))
            elif name in self._job.captured.graph.param_of:
                raise InvalidConfig("resume", source, f"has no tensor {name}", "name a run of the same model")
        slots = self._stored_state(stored)
        for optimizer in self._optimizers:
            number = {id(param): i for i, param in enumerate(_params(optimizer))}
            mine = {name: state for name, state in slots.items() if id(self._weights[name]) in number}
            state = {number[id(self._weights[name])]: values for name, values in mine.items()}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
            # torch gives what it loads the parameter's type, and NAdam's product of factors is float32 beside every type.
            for param, values in ((param, state.get(i, {})) for i, param in enumerate(_params(optimizer))):
                own = optimizer.state[param] if values else {}
                own.update({s: value.to(own[s].device) for s, value in values.items() if own[s].dtype != value.dtype})

    def _own(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a weight, or of a tensor of its state, that is stored whole."""
        split = self._split.split(name) and value.shape == self._split.whole_shape(name)
        return self._split.share(name, value) if split else value

    def _stored_state(self, stored: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The stored optimizer state of the rank's own parameters: name -> slot -> tensor."""
        trained = self._trained()
        slots: dict[str, dict[str, torch.Tensor]] = {}
        for key in stored:
            name, _, slot = key.removeprefix(OPTIMIZER).rpartition(".")
            if key.startswith(OPTIMIZER) and name in trained:
                value, param = self._own(name, stored[key]), trained[name].detach()
                # In the parameter's own memory layout: a fused optimizer walks both by address.
                like = torch.empty_like(param, dtype=value.dtype) if value.shape == param.shape else torch.empty_like(value)
                slots.setdefault(name, {})[slot] = like.copy_(value)
        return slots

    def _trained(self) -> dict[str, torch.Tensor]:
        """The parameters that an optimizer updates."""
        held = {id(param) for optimizer in self._optimizers for param in _params(optimizer)}
        return {name: tensor for name, tensor in self._weights.items() if id(tensor) in held}

    def save(
        self,
        done: int,
        start: int | None = None,
        *,
        history: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Save the state after `done` steps; returns as soon as it is copied. One at a time: an earlier one is awaited.

        Args:
            start: with micro-batches in flight: steps done when the pipeline was last empty.
            history: key -> name -> other weights than the latest.
            before: buffers as they were when the forwards of step `done` began, if they have.

        Raises:
            Exhausted: the earlier one could not be written, as the disk is full, for example.
            RuntimeError: it could not be written for another reason.
            NonFinite: its weights were not finite, and the run is to stop then.
        """
        self.wait()
        state = dict(self._state())
        state |= {WEIGHTS + name: tensor for name, tensor in (before or {}).items() if name in self._owned}
        for key, tensors in (history or {}).items():
            state |= {f"{HISTORY}{key}.{name}": tensor for name, tensor in tensors.items() if name in self._owned}
        for name, tensor in state.items():
            if name not in self._copy:
                self._copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copy[name].copy_(tensor, non_blocking=True)
        if any(copy.is_pinned() for copy in self._copy.values()):
            # Only this stream: what is received for coming passes may wait for others.
            torch.cuda.current_stream().synchronize()
        names = list(state)
        stream = None if start is None else PipelineState(start=start, plan=stream_digest(self._job.plan, self._settings.weights))
        self._thread = threading.Thread(target=self._write, args=(done, names, stream), name=f"checkpoint-{done}", daemon=True)
        self._thread.start()

    def in_flight(self, names: Iterable[str]) -> tuple[int, dict[str, dict[str, torch.Tensor]]] | None:
        """Micro-batches in flight in the checkpoint that this run goes on from: `start` and `history` of its `save`.

        None where there were none, or where this run's plan or weight policy is another.

        Raises:
            InvalidConfig: a file cannot be read.
        """
        if self._settings.resume is None:
            return None
        folder = Path(self._settings.resume)
        manifest = read_manifest(folder)
        if isinstance(manifest, str):
            raise InvalidConfig("resume", folder, manifest, AGAIN)
        stream = manifest.stream
        if stream is None or stream.plan != stream_digest(self._job.plan, self._settings.weights):
            return None
        wanted, found = set(names), dict[str, dict[str, torch.Tensor]]()
        with _opened(folder) as stored:
            for full in stored:
                key, _, name = full.removeprefix(HISTORY).partition(".")
                if full.startswith(HISTORY) and name in wanted:
                    found.setdefault(key, {})[name] = stored[full]
        return stream.start, found

    def wait(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            Exhausted: it could not be written, as the disk is full, for example.
            RuntimeError: it could not be written for another reason.
            NonFinite: its weights were not finite, and the run is to stop then.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(self._error, GppError):
            raise self._error
        if self._error is not None:
            if plain := Exhausted.of(self._error):
                raise Exhausted(f"a checkpoint could not be written below {self._root}: {plain}") from None
            raise RuntimeError(f"a checkpoint could not be written below {self._root}: {self._error}") from self._error

    def held(self, names: Collection[str] | None = None, *, state: bool = True) -> Iterator[tuple[str, str, torch.Tensor]]:
        """What the rank holds: (name in a checkpoint, weight that it is of, tensor), as they are here: shares of split weights.

        Args:
            names: of these weights only; None: of all.
            state: whether the optimizer's state is in it.
        """
        for name, tensor in self._weights.items():
            if names is None or name in names:
                yield WEIGHTS + name, name, tensor.detach()
        name_of = {id(tensor): name for name, tensor in self._weights.items()}
        for optimizer in self._optimizers if state else ():
            for param in _params(optimizer):
                # An engine may train a stand-in of its own, which is none of the model's.
                name = name_of.get(id(param))
                if name is not None and (names is None or name in names):
                    # State that is not there yet (momentum without a gradient) is None.
                    for slot, value in optimizer.state.get(param, {}).items():
                        if isinstance(value, torch.Tensor):
                            yield f"{OPTIMIZER}{name}.{slot}", name, value

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the rank saves, whole; every rank whose share is wanted takes part."""
        for key, name, tensor in self.held({name for name in self._weights if name in self._owned or self._split.helps(name)}):
            whole = self._split.whole(name, tensor) if tensor.shape == self._weights[name].shape else tensor
            if name in self._owned:
                yield key, whole

    def _write(self, done: int, names: list[str], stream: PipelineState | None) -> None:
        part = self._root / f".step_{done}"
        file = part / f"rank_{self._rank}.safetensors"
        try:
            if names:
                write_tensors(file, {name: self._copy[name] for name in names}, synced=True)
            note = Note(files={file.name: Mark.of(file)} if names else {}, nonfinite=self._nonfinite(done, names))
            write_text(part / f"rank_{self._rank}.json", to_json(note), exact=True, synced=True)
            if self._rank == 0:
                self._finish(part, done, stream)
        except BaseException as error:  # for the training thread, which raises it where it waits next
            self._error = error

    def _nonfinite(self, done: int, names: list[str]) -> tuple[str, ...]:
        """Trained parameters in this rank's copy with a value that is not finite.

        Raises:
            NonFinite: there are some, and the run is to stop then.
        """
        trained = self._trained()
        found = nonfinite({name: self._copy[WEIGHTS + name] for name in trained if WEIGHTS + name in names})
        if found and self._settings.on_nonfinite != "warn":
            raise NonFinite(
                f"the weights {shown(found)} are not finite after {done} steps, so that no checkpoint was made of them: the "
                "gradient of an earlier step was not"
            )
        return found

    def _finish(self, part: Path, done: int, stream: PipelineState | None) -> None:
        """Wait for every rank's note, then give the folder the name of a whole one."""
        settings, said = self._settings, list[Note]()
        notes = [part / f"rank_{rank}.json" for rank in range(self._world)]
        until = time.monotonic() + settings.startup_timeout_s
        for rank, note in enumerate(notes):
            while not note.exists():
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"rank {rank} did not write its part within {settings.startup_timeout_s} s; do all ranks share {part}?"
                    )
                time.sleep(POLL_S)
            said.append(from_json(Note, note.read_text()))
        run = run_of(self._root.parent)
        epoch, next_sample = position(done, settings.minibatch_size, settings.train_samples)
        manifest = Manifest(
            step=done,
            epoch=epoch,
            next_sample=next_sample,
            steps=settings.steps,
            training=training_of(settings, self._job.captured),
            files={name: mark for note in said for name, mark in note.files.items()},
            run=run.id if run else "",
            nonfinite=tuple(sorted({name for note in said for name in note.nonfinite})),
            stream=stream,
        )
        write_text(part / MANIFEST, sealed(manifest), exact=True, synced=True)
        for note in notes:
            note.unlink()
        complete(part, self._root / f"step_{done}")
        prune(self._root.parent, settings.checkpoint_keep)


@contextmanager
def _opened(folder: Path) -> Iterator[Slices]:
    """The tensors of a checkpoint, whose files were whole when the run was prepared.

    Raises:
        InvalidConfig: a file cannot be read any more.
    """
    try:
        with ExitStack() as stack:
            yield Slices(*(stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")))
    except (OSError, SafetensorError) as error:
        raise InvalidConfig("resume", folder, f"a file of it cannot be read any more ({error})", AGAIN) from error


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters, in the order in which its state dict numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]
