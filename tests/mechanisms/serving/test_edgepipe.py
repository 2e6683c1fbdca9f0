"""edgepipe: exact against every plan, the published profiles, the published tool, and what is refused."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from baselines.released.pipeedge import PipeEdgeScheduler
from gpp import EdgePipe, Plan
from gpp.cost.problem import Problem
from gpp.cost.regime import Regime
from gpp.errors import Infeasible, InvalidConfig
from gpp.formats.pipeedge.graph import cluster
from gpp.mechanisms.serving.course import Requests
from gpp.mechanisms.serving.edgepipe.forward import Kinds
from gpp.mechanisms.serving.edgepipe.typed_chain import PlacedStage, TypedChain
from gpp.models.pipeedge import PipeEdge
from tests.checks.edgepipe import check
from tests.support.cli import run
from tests.support.long import thinned
from tests.support.problems import random_problem

PROFILES = Path(__file__).resolve().parents[3] / "sweeps" / "pipeedge"
MODELS, TYPES = PROFILES / "models.yml", PROFILES / "device_types.yml"


@pytest.mark.parametrize("shape", thinned(["graph", "chain"]))
def test_no_plan_is_faster(shape):
    """A sample of `python -m tests.checks.edgepipe`."""
    wrong, words = check(shape, range(1000, 1007))
    assert not wrong, words


def test_fitting_is_not_monotone():
    """Operators 0 and 1 together do not fit where 0 to 2 do, whose message is smaller."""
    fits = np.ones((1, 4, 4), bool)
    fits[0, 0, 2] = False
    chain = TypedChain(
        counts=(2,),
        prefix_s=np.array([[0.0, 1.0, 2.0, 3.0]]),
        fits=fits,
        move_s=np.broadcast_to(np.array([0.0, 9.0, 9.0, 0.0]), (1, 1, 4)),
    )
    assert chain.fastest() == [PlacedStage(0, 0, 3)]
    assert chain.within(2.9) is None


def planned(size: str, hosts: str, memory_bytes: float | None = None, **settings: Any) -> Plan:
    """The plan of a ViT's published profile on so many boards of each kind."""
    model = PipeEdge(
        name="pipeedge", loss="none", path=str(MODELS), entry=f"google/vit-{size}-patch16-224", types=str(TYPES), batch=8
    )
    found = cluster(types=str(TYPES), devices=str(PROFILES / f"devices_{hosts}.yml"))
    if memory_bytes is not None:
        found = replace(found, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in found.devices))
    problem = Problem(
        graph=model.captured().graph,
        cluster=found,
        cost=model.times,
        minibatch_size=8,
        microbatch_size=8,
        max_replicas=1,
        regime=Regime(course=Requests(buffers=2)),
    )
    plan = EdgePipe(released=PipeEdgeScheduler(), **settings).plan(
        problem, lambda _: SimpleNamespace(metrics=SimpleNamespace(iteration_s=1.0))
    )  # type: ignore[arg-type,return-value]
    plan.validate(problem)
    return plan


def slowest_s(plan: Plan, size: str, hosts: str) -> float:
    """Seconds of the slowest stage, by the files themselves; a message takes 0.2 s at most, and no stage is that fast."""
    entries = yaml.safe_load(TYPES.read_text())
    took = []
    for stage in plan.stages:
        kind = "Minnowboard-E3845" if stage.devices[0] < int(hosts[0]) else "RCC-VE-C2000"
        seconds = entries[kind]["model_profiles"][f"google/vit-{size}-patch16-224"][0]["time_s"]
        took.append(sum(seconds[op] for op in stage.ops))
    return max(took)


@pytest.mark.parametrize(
    ("size", "hosts", "ours", "tools"),
    [("base", "4_4", 1.549, 1.726), ("base", "8_8", 0.801, 0.994), ("large", "4_4", 5.043, 5.703), ("large", "8_8", 2.573, 2.996)],
)
def test_published_profiles(size, hosts, ours, tools):
    """What the published tool gives on its own profiles was seen by running it; corrected it is as good as ours."""
    assert slowest_s(planned(size, hosts), size, hosts) == pytest.approx(ours, abs=5e-4)
    assert slowest_s(planned(size, hosts, compatible=True), size, hosts) == pytest.approx(tools, abs=5e-4)
    if hosts == "4_4":
        assert slowest_s(planned(size, hosts, compatible=True, corrected=True), size, hosts) == pytest.approx(ours, abs=5e-4)


def test_the_published_schedule_of_the_readme():
    """PipeEdge's README gives six layers to every host, MinnowBoards first."""
    plan = planned("base", "4_4", compatible=True)
    assert [(len(stage.ops), stage.devices) for stage in plan.stages] == [(6, (d,)) for d in range(8)]


def test_devices_of_one_type_that_links_tell_apart():
    found = cluster(types=str(TYPES), devices=str(PROFILES / "devices_4_4.yml"))
    assert Kinds.of(found).counts == (4, 4)
    joined = Kinds.of(found).joined([1.0] * 8, 9)
    assert joined.counts == (8,) and joined.num_states == 9


def test_training_is_refused():
    problem = random_problem(0, max_ops=4, max_devices=2)
    with pytest.raises(InvalidConfig, match="mode=inference"):
        EdgePipe().plan(problem, lambda _: pytest.fail("nothing is predicted"))
    with pytest.raises(InvalidConfig, match=r"strategy\.planner\.corrected"):
        EdgePipe(corrected=True)


def test_from_the_command_line_to_a_schedule(tmp_path):
    words = (
        "model=pipeedge",
        f"model.path={MODELS}",
        "model.key=google/vit-base-patch16-224",
        "cluster=pipeedge",
        f"cluster.types={TYPES}",
        f"cluster.devices={PROFILES / 'devices_4_4.yml'}",
        "strategy=edgepipe",
        "mode=inference",
        "engine=simulate",
        "minibatch_size=8",
        "logger=none",
    )
    done = run(tmp_path / "run", *words)
    assert done.code == 0, done.out
    stages = yaml.safe_load((tmp_path / "run" / "job" / "schedule.yml").read_text())
    assert next(iter(stages[0])) == "mb-0" and len(stages) == 8
    bounds = [bound for stage in stages for bound in stage.values()]
    assert bounds[0][0] == 1 and bounds[-1][1] == 48
    assert all(after[0] == before[1] + 1 for before, after in pairwise(bounds))


def test_what_does_not_fit_is_infeasible_whichever_way_it_is_planned():
    for settings in ({}, {"compatible": True}):
        with pytest.raises(Infeasible, match="no plan found fits"):
            planned("base", "4_4", memory_bytes=20e6, **settings)
