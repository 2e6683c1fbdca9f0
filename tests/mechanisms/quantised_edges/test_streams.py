"""Real workers that send quantised messages give the answers of one process that codes the same tensors, to the bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from baselines.reference import serving
from gpp.mechanisms.quantised_edges.stage import EdgeBits
from gpp.mechanisms.serving.answers import finish
from gpp.runtime.job import Job
from tests.support.cli import run

STREAM = [
    *("mode=inference", "logger=none", "cost=analytical", "strategy=even", "minibatch_size=8", "microbatch_size=4", "steps=12"),
    *("cluster.num_devices=2", "model=mmt_small", "model.num_branches=2", "model.num_layers=2"),
    *("strategy.edges.bits=3", "strategy.edges.clip=true"),
]


def test_workers_equal_one_process(tmp_path: Path) -> None:
    done = run(tmp_path / "two", *STREAM)
    assert done.code == 0, done.out
    job = Job.load(tmp_path / "two")
    exact = replace(job, plan=replace(job.plan, stages=tuple(stage.without(EdgeBits) for stage in job.plan.stages)))
    for name, one in (("one", job), ("exact", exact)):
        shutil.copytree(tmp_path / "two" / "job", tmp_path / name / "job")
        (tmp_path / name / "ranks").mkdir()
        serving._run(one, tmp_path / name, 0, 1, torch.device("cpu"))
        finish(tmp_path / name)
    two, one, plain = (load_file(tmp_path / name / "answers.safetensors") for name in ("two", "one", "exact"))
    assert two.keys() == one.keys() and all(torch.equal(two[name], one[name]) for name in one)
    # Three bits are few: answers move, but not far.
    assert any(not torch.equal(one[name], plain[name]) for name in one)
    predicted, measured = (done.result[source]["communication_bytes"] for source in ("predicted", "measured"))
    whole = 8 * sum(t.bytes_per_sample for tensors in job.plan.edge_tensors(job.graph).values() for t in tensors)
    assert predicted < whole / 7 and predicted <= measured <= predicted * 1.05  # messages of several tensors are padded
    stages = json.loads((tmp_path / "two" / "job" / "plan.json").read_text())["stages"]
    assert stages[0]["mechanisms"] == {"quantised_edges": {"bits": [[1, 3]], "clip": True}}
