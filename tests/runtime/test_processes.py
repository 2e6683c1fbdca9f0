"""Real worker processes give the single device's losses and weights; imported models keep their towers side by side."""

import json
from pathlib import Path

import pytest
import torch

from gpp import Adam, Plan
from gpp.data.digits import DigitsData
from gpp.data.synthetic import Synthetic
from gpp.graph.op_graph import OpGraph
from gpp.runtime.checkpoint.final import load_final
from gpp.serialization import read_json
from tests.support import inprocess
from tests.support.cli import Finished, run
from tests.support.conf import model_named

STEPS, MINIBATCH = 10, 48
COMMON = [
    "logger=none",
    "cost=analytical",
    "dtype=float64",
    f"steps={STEPS}",
    "evaluate_every=0",
    f"minibatch_size={MINIBATCH}",
    "microbatch_size=8",
]

pytestmark = pytest.mark.dist


def check_against_one_device(done: Finished, name: str, *overrides: str) -> None:
    """Losses to 1e-9, every parameter to 1e-8."""
    assert done.code == 0, done.out
    model = model_named(name, *overrides)
    data = DigitsData() if name.startswith("digits") else Synthetic()
    with inprocess.default_dtype("float64"):
        torch.manual_seed(0)
        initial = {k: v.clone() for k, v in model.build().state_dict().items()}
    losses, params = inprocess.reference(
        model, data, Adam(lr=0.0005), initial, steps=STEPS, minibatch_size=MINIBATCH, dtype="float64"
    )
    assert done.result["loss"] == pytest.approx(losses, abs=1e-9)
    if terms := done.result.get("loss_terms"):
        assert [sum(values) for values in zip(*terms.values(), strict=True)] == pytest.approx(losses, abs=1e-9)
        lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert {"loss", *(f"loss:{name}" for name in terms)} <= set(lines[0]) and "loss" in lines[-1]["eval"]
    state = load_final(done.run_dir)
    for tensor_name, tensor in params.items():
        if tensor.grad is not None or tensor_name in state:
            torch.testing.assert_close(state[tensor_name], tensor, rtol=0, atol=1e-8, msg=lambda m, n=tensor_name: f"{n}: {m}")


def test_losses_and_weights_of_one_device(tmp_path: Path) -> None:
    """`tests.checks.equivalence` has other models, strategies and numbers of workers, with replicas and without."""
    name = "digits_tasks"
    done = run(
        tmp_path,
        *COMMON,
        f"model={name}",
        *inprocess.few_layers(name),
        "strategy=graphpipe",
        "cluster.num_devices=2",
        "graph.max_ops=24",
        "strategy.planner.replication=false",
    )
    check_against_one_device(done, name, *inprocess.few_layers(name))


@pytest.mark.long
def test_imported_towers_run_at_the_same_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name, towers = "clip_imported", ("text_model", "vision_model")
    done = run(tmp_path, *COMMON, f"model={name}", "cluster.num_devices=3", "strategy.planner.replication=false")
    check_against_one_device(done, name)
    plan = read_json(Plan, tmp_path / "job" / "plan.json")
    graph = read_json(OpGraph, tmp_path / "job" / "graph.json")
    first = {
        tower: next(s for s, stage in enumerate(plan.stages) for op in stage.ops if graph.ops[op].name.startswith(tower))
        for tower in towers
    }
    assert len(set(first.values())) == 2
    events = json.loads((tmp_path / "timeline.json").read_text())["predicted"]["events"]
    spans = [
        [(start, end) for _, kind, stage, _, start, end, _ in events if kind == "F" and stage == first[tower]] for tower in towers
    ]
    assert any(a[0] < b[1] and b[0] < a[1] for a in spans[0] for b in spans[1])


@pytest.mark.long
def test_a_contrastive_loss_on_whole_minibatches(tmp_path: Path) -> None:
    """Its stage shares a device and waits for six micro-batches of each tower, in the evaluation too.

    In threads: tests/runtime/test_coupled_losses.py.
    """
    overrides = ["model.loss=gpp.models.networks.clip.contrastive_loss", "model.image_layers=1", "model.text_layers=1"]
    done = run(tmp_path, *COMMON, "model=clip_small", *overrides, "loss.scope=minibatch", "cluster.num_devices=2")
    check_against_one_device(done, "clip_small", *overrides)
    plan = read_json(Plan, tmp_path / "job" / "plan.json")
    sizes = sorted(stage.microbatch_size for stage in plan.stages)
    assert sizes[-1] == 48 and set(sizes[:-1]) == {8} and plan.shares_devices
    assert "compares the samples" not in done.out
