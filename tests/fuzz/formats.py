"""Every file that the platform reads, as it is written, and what must hold of a damaged one.

A format offers files with their right content, and `use`, which does with the folder what a user would, as far as no process
starts. It returns whether the file was accepted; then everything after the reading worked. What is refused raises one of the
project's errors.
"""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import final

from gpp import SGD, Analytical, GraphPipe, NoFlush, OneFOneB, Sequential, Simulate, Stash, Strategy
from gpp.app.experiment import Experiment
from gpp.cluster import Cluster, flat
from gpp.cost.models.constant import Constant
from gpp.cost.models.profiled import GraphProfile, Profiled, cpu_setting, sample_counts
from gpp.cost.problem import Problem
from gpp.data.synthetic import Synthetic
from gpp.errors import Infeasible
from gpp.formats.profiles import read_profile
from gpp.graph.captured import load_cached, store
from gpp.graph.coarsen.coarsen import coarsen
from gpp.program.program import Program, check_program
from gpp.report.sweep.files import write_sweep
from gpp.report.sweep.jobs import AskedJob
from gpp.runtime.checkpoint.resume import find, training_of
from gpp.runtime.job import Job, restore
from gpp.runtime.worker.worker import Worker
from gpp.serialization import read_text, to_json
from tests.support.cli import run
from tests.support.conf import CONF
from tests.support.inprocess import captured_named, in_threads, make_job, problem_of, workers_of
from tests.support.published import PROFILES

FLUSHING = Strategy(name="graphpipe", planner=GraphPipe(), schedule=OneFOneB())
CHAINED = Strategy(name="sequential", planner=Sequential(), schedule=OneFOneB())
STREAMING = Strategy(name="pipedream", planner=Sequential(), schedule=NoFlush(), weights=Stash())
MODEL = "digits"


class AbstractFormat(ABC):
    """One kind of file."""

    named = True
    """Whether a refusal must name the file. (A cache is silent: what is damaged in it is made again.)"""

    @abstractmethod
    def files(self) -> Mapping[str, bytes]:
        """Relative path -> content, of all files that a use needs; every one of them is damaged in turn."""

    def victims(self) -> list[str]:
        """The files that are damaged."""
        return sorted(self.files())

    @abstractmethod
    def use(self, folder: Path) -> bool:
        """Do with the files in a folder what a user would do.

        Raises:
            GppError: a file is refused.
        """


def small_problem(num_devices: int = 3) -> Problem:
    """A real model's problem, small enough to plan in milliseconds."""
    _, captured, _ = captured_named(MODEL)
    return problem_of(captured, num_devices, 24, max_ops=10)


@cache
def small_job() -> Job:
    model, captured, _ = captured_named(MODEL)
    problem = small_problem()
    return make_job(
        captured,
        problem,
        CHAINED.plan(problem),
        OneFOneB(),
        model=model,
        data=Synthetic(num_samples=64, num_test_samples=32),
        optimizer=SGD(lr=0.1, momentum=0.9),
        steps=3,
        dtype="float64",
        held_out=32,
    )


@final
class Plans(AbstractFormat):
    """`plan=FILE`: what is accepted is valid, can be lowered, and is simulated."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self._problem = strategy, small_problem()

    def files(self) -> Mapping[str, bytes]:
        return {"plan.json": to_json(self._strategy.plan(self._problem)).encode()}

    def use(self, folder: Path) -> bool:
        model, _, _ = captured_named(MODEL)
        experiment = Experiment(
            name="fuzz",
            model=model,
            data=Synthetic(num_samples=64),
            cluster=self._problem.cluster,
            cost=Analytical(),
            strategy=self._strategy,
            engine=Simulate(),
            optimizer=SGD(lr=0.1, momentum=0.9),
            steps=2,
            minibatch_size=self._problem.minibatch_size,
            cache_dir=str(folder),
            plan=str(folder / "plan.json"),
        )
        experiment.check()
        plan = experiment.make_plan(self._problem)
        predicted = self._strategy.predict(plan, self._problem)
        assert predicted.metrics.iteration_s > 0
        assert to_json(plan)
        return True


@final
class Profiles(AbstractFormat):
    """`model=profile model.path=FILE`: what is accepted is planned and simulated."""

    def __init__(self, name: str) -> None:
        self._name = name

    def files(self) -> Mapping[str, bytes]:
        return {self._name: (PROFILES / self._name).read_bytes()}

    def use(self, folder: Path) -> bool:
        graph = read_profile(folder / self._name)
        problem = Problem(graph=coarsen(graph, 8), cluster=_nominal(), cost=Constant(), minibatch_size=4)
        try:
            plan = CHAINED.plan(problem)
        except Infeasible:
            return True  # a profile may be larger than any device
        metrics = CHAINED.predict(plan, problem).metrics
        assert 0 <= metrics.iteration_s < float("inf")
        return True


@cache
def _nominal() -> Cluster:
    return flat(num_devices=3, bandwidth_bytes_per_s=1e9, memory_bytes=1e11)


@final
class Jobs(AbstractFormat):
    """RUN_DIR/job: what is accepted is what workers can be made of, as far as to their first step."""

    def files(self) -> Mapping[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            small_job().save(Path(folder), captured_named(MODEL)[2])
            return {f"job/{path.name}": path.read_bytes() for path in sorted((Path(folder) / "job").iterdir())}

    def use(self, folder: Path) -> bool:
        job = Job.load(folder)
        for description in (job.settings.optimizer, job.settings.data, job.settings.model, job.settings.weights):
            assert not description or restore(description) is not None
        workers = workers_of(job, folder)
        assert len(workers) == job.plan.num_devices
        return True


@final
class GraphCache(AbstractFormat):
    """CACHE/graphs: a damaged capture is as good as none; none is ever another than the one that was stored."""

    named = False

    def files(self) -> Mapping[str, bytes]:
        _, captured, _ = captured_named("mlp")
        with tempfile.TemporaryDirectory() as folder:
            return {"key.json": store("key", captured, folder).read_bytes()}

    def use(self, folder: Path) -> bool:
        found = load_cached("key", folder)
        assert found is None or found == captured_named("mlp")[1], "another capture than the one that was stored"
        if found is None:
            store("key", captured_named("mlp")[1], folder)
            assert load_cached("key", folder) is not None, "the cache cannot be mended"
        return found is not None


@final
class ProfileCache(AbstractFormat):
    """CACHE/*.json, measured times: as for graphs."""

    named = False

    def __init__(self) -> None:
        self._graph, self._setting = coarsen(captured_named("mlp")[1].graph, 4), cpu_setting(optimizer="SGD")
        counts = sample_counts(8)
        rows = tuple(tuple(1e-3 * (i + 1) * n for n in counts) for i in range(self._graph.num_ops))
        self._profile = GraphProfile(
            graph_fingerprint=self._graph.fingerprint, setting=self._setting, sample_counts=counts, forward_s=rows, backward_s=rows
        )

    def files(self) -> Mapping[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            path = Profiled(cache_dir=folder).store(self._graph, self._profile)
            return {path.name: path.read_bytes()}

    def use(self, folder: Path) -> bool:
        cost = Profiled(cache_dir=str(folder))
        found = cost.load(self._graph, self._setting)
        assert found in (None, self._profile), "other times than those that were stored"
        if found is None:
            cost.store(self._graph, self._profile)
        return found is not None


@final
class Programs(AbstractFormat):
    """A program's text by itself: what is accepted reads back equal, and is proved to run, or refused by name."""

    named = False

    def files(self) -> Mapping[str, bytes]:
        return {"program.txt": small_job().program.to_text().encode()}

    def use(self, folder: Path) -> bool:
        program = Program.from_text(read_text(folder / "program.txt"))
        assert Program.from_text(program.to_text()) == program
        check_program(program)
        return True


CONFIGURATION = "0123456789abcdef"


@final
class Sweeps(AbstractFormat):
    """A folder of results: the sweep's table and page are made, whatever one of them holds."""

    named = False

    def files(self) -> Mapping[str, bytes]:
        metrics = {"iteration_s": 2.0, "throughput_samples_per_s": 8.0, "bubble_fraction": 0.1, "communication_bytes": 64}
        times = {**metrics, "peak_memory_bytes": {"0": 10, "1": 20}, "max_in_flight_samples": {"0": 2}}
        result = {
            "status": "ok",
            "reason": None,
            "model": "mlp",
            "strategy": "graphpipe",
            "cluster": "local",
            "engine": "simulate",
            "seed": 0,
            "plan": {"num_stages": 2, "depth": 2, "microbatch_sizes": {"0": 4, "1": 4}, "optimality_gap": 0.1},
            "predicted": times,
            "measured": {**times, "iteration_s": 2.5},
            "prediction_error": 0.25,
            "loss": [2.0, 1.5],
            "final_metric": {"loss": 1.0},
            "planning_peak_bytes": 1000,
            "configuration": CONFIGURATION,
        }
        compared = [{**result, "strategy": name} for name in ("graphpipe", "sequential")]
        return {
            "0/result.json": json.dumps(result, indent=1).encode(),
            "1/result.json": json.dumps({**result, "strategy": "sequential", "seed": 1}, indent=1).encode(),
            "2/result.json": json.dumps({**result, "compared": compared}, indent=1).encode(),
        }

    def use(self, folder: Path) -> bool:
        words = ("strategy=graphpipe", "model=mlp", "seed=0")
        jobs = write_sweep(folder, [AskedJob(folder=str(i), overrides=words, configuration=CONFIGURATION) for i in range(3)])
        assert len(jobs) == 3 and (folder / "report.html").stat().st_size > 0
        wrong = [job for job in jobs if job.result["status"] == "failed" and "result.json" in str(job.result.get("reason"))]
        return not wrong


@final
class Checkpoints(AbstractFormat):
    """`resume=RUN_DIR`: a checkpoint whose manifest is damaged is passed over for the one before, or refused by name.

    The name is the folder's: a checkpoint is one to its user.
    """

    named = False

    def files(self) -> Mapping[str, bytes]:
        job = replace(small_job(), settings=replace(small_job().settings, checkpoint_every=1))
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder)
            job.save(run_dir, captured_named(MODEL)[2])

            def save(worker: Worker) -> None:
                for step in (1, 2):
                    worker.checkpoints.save(step)
                    worker.checkpoints.wait()

            in_threads([partial(save, worker) for worker in workers_of(job, run_dir)])
            found = {str(path.relative_to(run_dir)): path for path in sorted((run_dir / "checkpoints").rglob("*.*"))}
            # The tensors are read by nobody here, and digests of them are the business of tests/runtime.
            return {name: path.read_bytes() for name, path in found.items() if path.is_file()}

    def victims(self) -> list[str]:
        return ["checkpoints/step_1/checkpoint.json", "checkpoints/step_2/checkpoint.json"]

    def use(self, folder: Path) -> bool:
        found = find(folder, 3)
        settings = small_job().settings
        found.refuse_another(training_of(settings, small_job().captured))
        assert all(isinstance(line, str) for line in found.warnings(3, SGD(lr=0.1, momentum=0.9).learning_rate))
        return found.folder.name == "step_2"


@final
class Clusters(AbstractFormat):
    """A cluster of the user's own, as YAML in a folder given with `-cd`: the command plans, or says what is wrong in it."""

    named = False

    def files(self) -> Mapping[str, bytes]:
        text = (CONF / "cluster" / "summit_1x4.yaml").read_bytes()
        return {"cluster/mine.yaml": text.replace(b"# @package cluster\n", b"")}

    def use(self, folder: Path) -> bool:
        words = ("-cd", str(folder), "cluster=mine", "model=mlp", "mode=plan", "explain_s=0", "logger=none", "cost=analytical")
        done = run(folder / "run", *words, "engine=simulate", "minibatch_size=16", "strategy=even")
        assert done.code in (0, 2, 3), f"ends with {done.code}: {done.out[-300:]}"
        assert "Traceback" not in done.out, done.out[-600:]
        assert done.code == 0 or "Fix:" in done.out or "Smallest change" in done.out, f"says no fix: {done.out[-300:]}"
        return done.code == 0


SLOW = ("cluster",)
"""Formats that are used by a command of their own for every case: the ordinary tests leave them out."""

FORMATS: dict[str, Callable[[], AbstractFormat]] = {
    "plan": lambda: Plans(FLUSHING),
    "plan_async": lambda: Plans(STREAMING),
    "profile_txt": lambda: Profiles("b2x16.graph.txt"),
    "profile_plain": lambda: Profiles("b2x16.json"),
    "profile_piper": lambda: Profiles("b2x16.piper.json"),
    "job": Jobs,
    "graph_cache": GraphCache,
    "profile_cache": ProfileCache,
    "program": Programs,
    "sweep": Sweeps,
    "checkpoint": Checkpoints,
    "cluster": Clusters,
}
