"""Every file that the platform reads, as it is written, and what must hold of a damaged one.

A format offers files with their right content, and `use`, which does with the folder what a user would, as far as no process
starts. It returns whether the file was accepted; then everything after the reading worked. What is refused raises one of the
project's errors.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import final

from gpp.app.experiment import Experiment
from gpp.cluster import Cluster
from gpp.cost.models.analytical import Analytical
from gpp.cost.models.profiled import Profile, Profiled, cpu_setting, sample_counts
from gpp.cost.models.tabulated import Tabulated
from gpp.cost.problem import Problem
from gpp.data.synthetic import Synthetic
from gpp.errors import Infeasible
from gpp.graph.captured import load_cached, store
from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.profiles import read_profile
from gpp.loggers.none import NoLogger
from gpp.optimizers import SGD
from gpp.planners.chains.sequential import Sequential
from gpp.planners.graphpipe.graphpipe import GraphPipe
from gpp.program.program import Program, check_program
from gpp.report.sweep.files import write_sweep
from gpp.runtime.engines.simulate import Simulate
from gpp.runtime.job import Job, restore
from gpp.schedules.no_flush import NoFlush
from gpp.schedules.one_f_one_b import OneFOneB
from gpp.serialization import read_text, to_json
from gpp.strategy import Strategy
from gpp.weights.stash import Stash
from tests.support.inprocess import captured_named, make_job, problem_of, workers_of
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
            optimizer=SGD(lr=0.1),
            logger=NoLogger(),
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
        problem = Problem(graph=coarsen(graph, 8), cluster=_nominal(), cost=Tabulated(), minibatch_size=4)
        try:
            plan = CHAINED.plan(problem)
        except Infeasible:
            return True  # a profile may be larger than any device
        metrics = CHAINED.predict(plan, problem).metrics
        assert 0 <= metrics.iteration_s < float("inf")
        return True


@cache
def _nominal() -> Cluster:
    from gpp.cluster import flat

    return flat(num_devices=3, bandwidth_bytes_per_s=1e9, memory_bytes=1e11)


@final
class Jobs(AbstractFormat):
    """RUN_DIR/job: what is accepted is what workers can be made of, as far as to their first step."""

    def files(self) -> Mapping[str, bytes]:
        import tempfile

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
        import tempfile

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
        self._profile = Profile(
            graph_fingerprint=self._graph.fingerprint, setting=self._setting, sample_counts=counts, forward_s=rows, backward_s=rows
        )

    def files(self) -> Mapping[str, bytes]:
        import tempfile

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
        }
        compared = [{**result, "strategy": name, "compared": None} for name in ("graphpipe", "sequential")]
        for one in compared:
            del one["compared"]
        return {
            "0/result.json": json.dumps(result, indent=1).encode(),
            "0/.hydra/overrides.yaml": b"- strategy=graphpipe\n- model=mlp\n- seed=0\n",
            "1/result.json": json.dumps({**result, "strategy": "sequential", "seed": 1}, indent=1).encode(),
            "1/.hydra/overrides.yaml": b"- strategy=sequential\n- model=mlp\n- seed=1\n",
            "2/result.json": json.dumps({**result, "compared": compared}, indent=1).encode(),
        }

    def use(self, folder: Path) -> bool:
        jobs = write_sweep(folder)
        assert len(jobs) >= 2 and (folder / "report.html").stat().st_size > 0
        wrong = [job for job in jobs if job.result["status"] == "failed" and "result.json" in str(job.result.get("reason"))]
        return not wrong


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
}
