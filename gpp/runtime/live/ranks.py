"""A pipeline under one's own launcher: every rank runs the user's program, and is the worker of one device in that very process.

Rank 0 plans and hands the job out (`gpp.runtime.controller.leader`); from then on all of them make the same calls in the same
order, as with collectives of torch.distributed: a step begins with a comparison of what the ranks were given.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from gpp.errors import InvalidConfig, WorkerFailed
from gpp.files import write_bytes, write_text
from gpp.graph.captured import is_loss
from gpp.runtime.controller.attendant import Attendant
from gpp.runtime.controller.leader import Leader
from gpp.runtime.controller.place import LaunchPlace
from gpp.runtime.hang_detection.status import RESTING, SILENT, RankState, Status, read_state, status_path
from gpp.runtime.job import Job
from gpp.runtime.live.worker import Do, LiveWorker
from gpp.runtime.worker.main import working
from gpp.runtime.worker.process import BEAT_S, clear_rank, device_of, kind_of, open_lines, report

Tensors = Mapping[str, torch.Tensor]

QUIET_S = 2.0
"""Seconds without a sign of life after which a rank, with which a connection has just broken, counts as gone."""

SAMPLED = 1024
"""Numbers of each tensor of a batch by which the ranks compare what they were given."""


_parts = count()


def place_in(place: LaunchPlace, *, interface: str, limit_s: float) -> Leader | Attendant:
    """This process among the ranks of a launch, before there is a job: `give` and `take` hand it out.

    Args:
        limit_s: for the others to come, and for rank 0 to plan.
    """
    make = Attendant if place.rank else Leader
    # Each further pipeline has a part of the store of its own.
    part = f"gpp-ranks/{next(_parts)}"
    return make(place, interface=interface, words=[], limit_s=limit_s, part=part, setting="run.folder")


class Ranks:
    """This process's worker among those of all ranks; every method is called by all of them.

    Raises:
        WorkerFailed: from any method: another rank is gone, or failed.
    """

    def __init__(self, meeting: Leader | Attendant, job: Job, run_dir: Path) -> None:
        place, self._run_dir = meeting.place, run_dir
        self.rank, self._world = place.rank, place.world
        if dist.is_initialized():
            rule = "is initialised already, and the pipeline makes a group of its own"
            raise InvalidConfig("torch.distributed", "init_process_group", rule, "call gpp.parallelize before, or leave it out")
        self._device = device_of(job, place.local_rank)
        self._group = torch.device(self._device if job.settings.backend == "nccl" else "cpu")
        self._stack, self._forms, self._over = ExitStack(), 1, threading.Event()
        clear_rank(run_dir / "ranks", self.rank)
        self._status = Status(status_path(run_dir / "ranks", self.rank))
        threading.Thread(target=self._beat, daemon=True).start()
        self._guard(lambda: self._enter(meeting, job))

    def _enter(self, meeting: Leader | Attendant, job: Job) -> None:
        made = working(job, self._run_dir, self.rank, self._world, self._device, LiveWorker, meeting.store)
        self._worker = self._stack.enter_context(made)
        lines = self._stack.enter_context(open_lines(self._run_dir, self.rank))
        self._stack.enter_context(self._worker.opened(lines))
        self.notes = self._worker.notes
        self._status.enter(RESTING)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._status.beat()

    def agree(self, batch: Tensors, constants: Mapping[str, Any]) -> None:
        """Refuse batches that differ between the ranks: by their shapes, by some of their numbers, and by what is no tensor.

        Raises:
            InvalidConfig: names the ranks.
        """
        found = self._guard(lambda: self._gathered([_digest(batch, constants)]))
        others = [rank for rank, number in enumerate(found) if number != found[0]]
        if others:
            rule = f"differs from that of rank 0 on {'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others))}"
            fix = "give every rank the same batches: the same seed for the sampler, and no DistributedSampler"
            raise InvalidConfig("batch", f"of rank {self.rank}", rule, fix)

    def add(self, make: Callable[[], tuple[Job, Tensors]]) -> Job:
        """Be ready for batches of another form; its job, which rank 0 makes.

        Raises:
            InvalidConfig: on all ranks, where `make` raises it on rank 0.
        """
        folder, job, error = self._run_dir / "forms" / str(self._forms), None, None
        if self.rank == 0:
            try:
                job, weights = make()
                job.save(folder, weights)
            except InvalidConfig as raised:
                error = raised
        return self._guard(lambda: self._add(folder, job, error))

    def _add(self, folder: Path, job: Job | None, error: InvalidConfig | None) -> Job:
        said = [error.field, str(error.value), error.rule, error.fix] if error else []
        if why := json.loads(self._from_first(json.dumps(said).encode())):
            raise error or InvalidConfig(*why)
        own, file = folder / "job", folder / "job" / "weights.safetensors"
        texts = {path.name: path.read_text() for path in own.iterdir() if path != file} if job else {}
        body = self._from_first(json.dumps(texts).encode())
        weights = self._from_first(file.read_bytes() if job else b"")
        # Ranks of one machine write the same; each of them whole, and none reads before all have written.
        if not file.exists():
            for name, text in json.loads(body).items():
                write_bytes(own / Path(name).name, text.encode())
            write_bytes(file, weights)
        self._gathered([0])
        self._worker.add(folder)
        self._forms += 1
        return self._worker.job

    def follow(self, values: Sequence[Mapping[str, Any]]) -> None:
        """As of `gpp.runtime.live.crew.Crew`; every rank's program changes them alike."""
        self._worker.follow(values)

    def ask(self, what: Do, batch: Tensors | None = None, form: int = 0) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Let all workers do the same; the sums of their numbers, and the tensors of all of them, on every rank."""
        return self._guard(lambda: self._ask(what, batch or {}, form))

    def _ask(self, what: Do, batch: Tensors, form: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        numbers, tensors = self._worker.do(what, {name: batch[name] for name in self._worker.reads if name in batch}, form)
        self._status.enter(SILENT)
        if what == "weights":
            bodies = self._from_all(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))
            return {}, {name: tensor for body in reversed(bodies) for name, tensor in load(body).items()}
        names = [name for name in self._worker.job.captured.results if what == "evaluate" or is_loss(name)]
        found = self._gathered([numbers.get(name, 0.0) for name in names], torch.float64)
        return {name: sum(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}, {}

    def end(self) -> None:
        """Write down what the workers have measured, and let rank 0 see it."""
        self._guard(self._end)

    def _end(self) -> None:
        self._worker.end()
        ranks = self._run_dir / "ranks"
        names = [f"rank_{self.rank}.jsonl", f"rank_{self.rank}.clock.json", f"device_{self._worker.device_id}.json"]
        own = {name: (ranks / name).read_text() for name in names if (ranks / name).exists()}
        for body in self._from_all(json.dumps(own).encode()):
            for name, text in json.loads(body).items() if self.rank == 0 else ():
                if not (ranks / name).exists():
                    write_text(ranks / name, text, exact=True)
        self.barrier()
        self._stack.close()
        self._over.set()

    def barrier(self) -> None:
        """Wait for all others."""
        self._guard(lambda: self._gathered([0]))

    def close(self, error: BaseException | None = None) -> None:
        """This rank leaves, and the others fail: no result is written."""
        if error is not None:
            report(self._run_dir / "ranks", self.rank, error, kind_of(error))
        self._leave()

    def _leave(self) -> None:
        self._over.set()
        # Whoever waits for this rank hears of its end by the connections.
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def _guard(self, call: Callable[[], Any]) -> Any:
        """Make a call in which ranks meet; a failure of another one is told in words."""
        self._status.enter(SILENT)
        try:
            return call()
        except InvalidConfig:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._status.waiting(False)
            self._status.enter(RESTING)

    def _fail(self, error: Exception) -> NoReturn:
        ranks, kind = self._run_dir / "ranks", kind_of(error)
        with suppress(OSError):
            report(ranks, self.rank, error, kind)
        found = self._gone() if kind == "lost" else None
        self._leave()
        if found:
            raise found from error
        raise error

    def _gone(self) -> WorkerFailed:
        """Which rank a broken connection tells of."""
        ranks = self._run_dir / "ranks"
        before = {rank: read_state(status_path(ranks, rank)) or RankState() for rank in range(self._world)}
        time.sleep(QUIET_S)
        for path in sorted(ranks.glob("rank_*.error.json")):
            said = json.loads(path.read_text())
            if said["kind"] == "error":
                return WorkerFailed(said["cause"], said["error"], said["traceback"])
        silent = [
            rank
            for rank, state in before.items()
            if rank != self.rank and (read_state(status_path(ranks, rank)) or RankState()).beat_ns == state.beat_ns
        ]
        if silent:
            return WorkerFailed(silent[0], "is gone: it was killed, or its program has ended", gone=tuple(silent))
        return WorkerFailed(self.rank, "has lost its connection to another rank, whose own output says why")

    def _gathered(self, own: list[Any], dtype: torch.dtype = torch.int64) -> list[list[Any]]:
        """Some numbers of every rank, by rank."""
        self._status.waiting(True)
        mine = torch.tensor(own, dtype=dtype, device=self._group)
        found = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(found, mine)
        self._status.waiting(False)
        return [one.tolist() for one in found]

    def _from_first(self, body: bytes) -> bytes:
        """The value of rank 0, on all ranks."""
        return self._from(0, body, self._gathered([len(body)])[0][0])

    def _from_all(self, body: bytes) -> list[bytes]:
        """The values of all ranks, by rank."""
        sizes = self._gathered([len(body)])
        return [self._from(rank, body, size) for rank, (size,) in enumerate(sizes)]

    def _from(self, rank: int, body: bytes, size: int) -> bytes:
        if not size:
            return b""
        here = rank == self.rank
        tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8) if here else torch.empty(size, dtype=torch.uint8)
        tensor = tensor.to(self._group)
        self._status.waiting(True)
        dist.broadcast(tensor, rank)
        self._status.waiting(False)
        return body if here else tensor.cpu().numpy().tobytes()


def _digest(batch: Tensors, constants: Mapping[str, Any]) -> int:
    """A number that batches of other shapes or samples do not share: of the shapes, the types, some values and the constants."""
    digest = hashlib.sha256(repr(sorted((name, repr(value)) for name, value in constants.items())).encode())
    for name, tensor in sorted(batch.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)].cpu()
        digest.update(some.contiguous().view(torch.uint8).numpy().tobytes() if some.numel() else b"")
    return int.from_bytes(digest.digest()[:8], "big", signed=True)
