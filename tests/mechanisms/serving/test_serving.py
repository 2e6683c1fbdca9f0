"""mode=inference on real processes, beside plain PyTorch in evaluation mode; and what it refuses before any of them starts."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpp.errors import InvalidConfig
from gpp.mechanisms.serving import answers
from gpp.mechanisms.serving.course import Requests
from gpp.mechanisms.serving.server import stay
from tests.support.cli import run
from tests.support.conf import option
from tests.support.inprocess import few_layers
from tests.support.one_process import answered, check_only

COMMON = ("mode=inference", "cost=analytical", "logger=none", "minibatch_size=8", "microbatch_size=4")
REQUESTS = 5


def plain(model: str, *overrides: str, weights: dict[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The answers to all requests: the user's module in evaluation mode, on one micro-batch after the other."""
    settings: Any = option("model", model, *overrides)
    torch.manual_seed(0)
    network = settings.build().eval()
    if weights is not None:
        network.load_state_dict(weights, strict=False)
    data: Any = option("data", "digits" if model == "digits" else "synthetic")
    samples = data.load("test", settings, seed=0, dtype="float32")
    made: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for lo in range(0, 8 * REQUESTS, 4):
            rows = samples.fetch(torch.arange(lo, lo + 4) % len(samples), set(settings.inputs()))
            found = network(**rows)
            parts = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else (found,)
            made.append(list(parts))
    return [torch.cat(column) for column in zip(*made, strict=True)]


def check(done: Any, expected: list[torch.Tensor]) -> dict[str, Any]:
    assert done.code == 0, done.out
    result, whole = done.result, load_file(done.run_dir / "answers.safetensors")
    found = {name: rows for name, rows in whole.items() if not name.startswith(answers.MARK)}
    assert len(found) == len(expected) == len(whole) / 2
    assert all(whole[f"{answers.MARK}{name}"].all() for name in found)
    assert result["answers"] == {"samples": 8 * REQUESTS, "answered": 8 * REQUESTS}
    for tensor in expected:
        assert any(own.shape == tensor.shape and torch.equal(own, tensor) for own in found.values())
    graph = json.loads((done.run_dir / "job" / "graph.json").read_text())
    billed = sum(op.get("answer_bytes", 0.0) for op in graph["ops"])
    assert billed * len(expected[0]) == sum(tensor.nbytes for tensor in found.values())
    for device, most in result["predicted"]["peak_memory_bytes"].items():
        assert result["measured"]["peak_memory_bytes"][device] <= most
    served = result["measured"]["serving"]
    assert served["requests"] == REQUESTS and served["median_s"] <= served["p95_s"] <= served["p99_s"]
    assert result["loss"] == [] and not (done.run_dir / "checkpoints").exists()
    actions = (done.run_dir / "job" / "program.txt").read_text().split()
    assert not any(word.partition(".")[2][:1] in ("B", "U") for word in actions)
    return result


@pytest.mark.dist
def test_four_branches_on_three_workers_answer_as_the_users_module(tmp_path: Path) -> None:
    torch.manual_seed(1)
    own = few_layers("digits")
    settings: Any = option("model", "digits", *own)
    weights = {name: tensor.contiguous() for name, tensor in settings.build().state_dict().items()}
    save_file(weights, tmp_path / "own.safetensors")
    words = ("model=digits", *own, "strategy=graphpipe", "cluster.num_devices=3", f"steps={REQUESTS}", "graph.max_ops=12")
    done = run(
        tmp_path / "run",
        *COMMON,
        *words,
        f"load_weights={tmp_path / 'own.safetensors'}",
        "engine.arrival_rate=200",
        "engine.buffers=1",
    )
    result = check(done, plain("digits", *own, weights=weights))
    assert result["measured"]["serving"]["arrival_rate"] == 200 and {"loss", "accuracy"} <= set(result["final_metric"])
    timelines = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert {event[1] for event in timelines["measured"]["events"]} <= {"F", "SF"}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("checkpoint.every=5",), ("checkpoint.every=5", "nothing to save", "leave checkpoint.every out")),
        (("strategy=pipedream",), ("strategy.weights", "no updates", "strategy/weights=flush")),
        (("strategy/memory=recompute",), ("strategy.memory", "nothing to recompute", "strategy/memory=keep")),
        (("strategy/schedule=gpipe",), ("strategy.schedule", "forwards only", "leave strategy/schedule out")),
        (("engine=torch_pipelining", "strategy=even"), ("mode=inference", "trains only", "engine=distributed")),
        (("engine.autocast=bfloat16",), ("engine.autocast", "is for training", "leave engine.autocast out")),
        (("engine.launch=external",), ("engine.launch", "is for training", "start python run.py without a launcher")),
        (("resume=outputs/nowhere",), ("resume", "only reads weights", "load_weights=outputs/nowhere")),
        (("engine.buffers=0",), ("engine.buffers=0", "at least 1")),
        (("engine.arrival_rate=-1",), ("engine.arrival_rate", "positive number")),
        (("strategy.objective=speed",), ("strategy.objective", "throughput")),
        (("mode=plan", "engine.arrival_rate=5"), ("engine.arrival_rate=5.0", "mode=plan answers none", "set mode=inference")),
        (("mode=plan", "strategy.objective=latency"), ("strategy.objective=latency", "answers none", "set mode=inference")),
    ],
)
def test_settings_of_a_training_are_refused(
    words: tuple[str, ...], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out = answered([*COMMON, "model=digits", f"hydra.run.dir={tmp_path}", *words], check_only, monkeypatch)
    assert code == 2, out
    for name in names:
        assert name in out


def test_workers_that_wait_for_requests_stay_on_processors_of_their_own() -> None:
    cores = sorted(os.sched_getaffinity(0))
    for workers, threads in ((len(cores), 1), (len(cores) + 1, 1), (1, 2)):
        for rank in range(workers):
            found: list[set[int]] = []
            # In a thread of its own, since it is the thread that stays.
            thread = threading.Thread(target=lambda: (stay(rank, workers, threads), found.append(os.sched_getaffinity(0))))  # noqa: B023
            thread.start()
            thread.join()
            assert found == [{cores[rank]} if workers <= len(cores) and threads == 1 else {*cores}]
    assert sorted(os.sched_getaffinity(0)) == cores


def test_answers_for_which_the_disk_has_no_room_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """40 answers of 10 floats; nothing is computed before."""
    from types import SimpleNamespace

    node = SimpleNamespace(shape=("b", 10), batch_dim=0, dtype="float32")
    captured = SimpleNamespace(results={"answer:logits": "n"}, node_of={"n": node})
    settings = SimpleNamespace(course=Requests(buffers=2, answers=True), steps=5)
    job: Any = SimpleNamespace(settings=settings, captured=captured, plan=SimpleNamespace(minibatch_size=8))
    for free, refused in ((1599, True), (1600, False)):
        monkeypatch.setattr(answers.os, "statvfs", lambda folder, free=free: SimpleNamespace(f_bavail=free, f_frsize=1))
        if refused:
            with pytest.raises(InvalidConfig, match=r"engine.answers=true: would take 1.60e\+03 bytes"):
                answers.check_room(job, tmp_path)
        else:
            answers.check_room(job, tmp_path)
