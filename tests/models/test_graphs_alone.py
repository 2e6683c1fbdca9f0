"""Models without a network: a profile, from the command line's objects to a simulated plan, and random graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpp.cost.models.constant import Constant
from gpp.cost.problem import Problem
from gpp.data.synthetic import Synthetic
from gpp.errors import InvalidConfig
from gpp.mechanisms.weight_versions.pipeoptim import PipeOptim
from gpp.models.profile import Profile
from gpp.models.random_graph import RandomGraph
from gpp.optimizers import Adam
from gpp.planners.chains.even import Even
from gpp.runtime.job import assemble
from gpp.runtime.job_asked import asked_model
from gpp.schedules.no_flush import NoFlush
from gpp.strategy import Strategy
from tests.support.cli import Finished, run
from tests.support.conf import model_named
from tests.support.problems import cluster
from tests.support.published import PROFILES


def story(tmp_path: Path, *words: str) -> Finished:
    return run(tmp_path, "model=profile", f"model.path={PROFILES / 'b2x16.piper.json'}", "logger=none", *words)


def test_plans_and_simulates_from_the_command_line(tmp_path):
    words = ("cluster=flat", "strategy=piper", "strategy.planner.compatible=true", "mode=plan", "minibatch_size=64", "explain_s=0")
    done = story(tmp_path, *words)
    assert done.code == 0, done.out
    assert "64.2 ms a sample" in done.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok" and result["plan"]["num_ops"] == 36
    assert result["model"] == "b2x16" and "one sample is one micro-batch of the profile" in done.out


def test_training_is_refused_before_anything_starts(tmp_path):
    done = story(tmp_path, "cluster=local")
    assert done.code == 2 and not (tmp_path / "job").exists()
    assert "is a profile" in done.out and "mode=plan" in done.out


def test_settings_are_checked():
    with pytest.raises(InvalidConfig, match=r"model\.path"):
        Profile(name="x", loss="none", path="nowhere.txt")
    with pytest.raises(InvalidConfig, match="no network to train"):
        Profile(name="x", loss="none", path=str(PROFILES / "b2x16.json")).build()


@pytest.mark.parametrize("kind", ["series_parallel", "dag", "towers", "chain"])
def test_the_same_settings_give_the_same_graph(kind: str) -> None:
    model = model_named("random", f"model.kind={kind}", "model.num_ops=33")
    one, other = model.captured(), RandomGraph(kind=kind, num_ops=33).captured()
    assert one == other and one.graph.num_ops == 33 and one.batch is None
    assert model.inputs() == model.targets() == {}


def test_towers_are_equal_branches_that_meet() -> None:
    graph = RandomGraph(kind="towers", num_ops=18, num_branches=4).captured().graph
    ends = [op for op in range(18) if 17 in {c for t in graph.tensors if t.producer == op for c in t.consumers}]
    assert len(ends) == 4 and len({op.forward_flops for op in graph.ops}) == 1
    assert len(graph.tensors) == 17


def test_it_cannot_be_trained() -> None:
    with pytest.raises(InvalidConfig, match="mode=plan"):
        RandomGraph().build()
    with pytest.raises(InvalidConfig, match="kind"):
        RandomGraph(kind="ring")
    with pytest.raises(InvalidConfig, match="num_branches"):
        RandomGraph(kind="towers", num_ops=4, num_branches=4).captured()


def test_weights_are_versioned_without_nodes_and_types_are_not_there_to_be_narrowed() -> None:
    captured, optimizer = RandomGraph(kind="chain", num_ops=6).captured(), Adam(lr=0.1)
    problem = Problem(graph=captured.graph, cluster=cluster(3), cost=Constant(), minibatch_size=8, optimizer=optimizer)
    strategy = Strategy(name="test", planner=Even(), schedule=NoFlush(), weights=PipeOptim())
    made = {"optimizer": optimizer, "data": Synthetic(), "steps": 2, "dtype": "float32", "seed": 0}
    job = assemble(captured, problem, strategy.plan(problem), strategy, **made)
    assert job.streams and len(job.plan.stages) == 3
    with pytest.raises(InvalidConfig, match=r"model=chain.*no types.*Fix: set engine.autocast=null"):
        asked_model(captured, optimizer, {"autocast": "bfloat16"})
