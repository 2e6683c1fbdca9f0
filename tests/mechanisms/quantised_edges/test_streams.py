"""Real workers that send quantised messages give the answers of one process that codes the same tensors, to the bit."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.cli import run
from tests.support.inprocess import few_layers

STREAM = [
    "mode=inference",
    "logger=none",
    "cost=analytical",
    "strategy=even",
    "minibatch_size=8",
    "microbatch_size=4",
    "steps=12",
    "cluster.num_devices=2",
]


def test_workers_equal_one_process(tmp_path: Path) -> None:
    bits = ["strategy.edges.bits=3", "strategy.edges.clip=true"]
    found = {
        name: run(tmp_path / name, *STREAM, "model=clip_small", *few_layers("clip_small"), *words)
        for name, words in (("two", bits), ("one", [*bits, "engine=reference"]), ("exact", ["engine=reference"]))
    }
    for name, one in found.items():
        assert one.code == 0, (name, one.out)
    two, one, exact = (load_file(tmp_path / name / "answers.safetensors") for name in ("two", "one", "exact"))
    assert all(torch.equal(two[name], one[name]) for name in one)
    # Three bits are few: answers move, but not far.
    assert any(not torch.equal(one[name], exact[name]) for name in one)
    result = found["two"].result
    predicted, measured = (result[source]["communication_bytes"] for source in ("predicted", "measured"))
    plain = found["exact"].result["predicted"]["communication_bytes"]
    assert predicted < plain / 7 and predicted <= measured <= predicted * 1.05  # messages of several tensors are padded
    stages = json.loads((tmp_path / "two" / "job" / "plan.json").read_text())["stages"]
    assert stages[0]["mechanisms"] == {"quantised_edges": {"bits": [[1, 3]], "clip": True}}
