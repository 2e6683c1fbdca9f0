"""The report itself, and where the tests would run: without a card."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import places
from tests.gpu.conftest import Report
from tests.gpu.places import ALL, CPU, ONE, Place, place_of


def phase(name: str, outcome: str = "passed", when: str = "call", **more: Any) -> Any:
    values = {
        "nodeid": f"tests/gpu/{name}",
        "outcome": outcome,
        "when": when,
        "duration": 1.25,
        "user_properties": [],
        "longrepr": None,
    }
    return SimpleNamespace(**values | more)


def test_outcomes_reasons_and_figures_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = Report(None)
    report.take(phase("a.py::x[cpu]", user_properties=[("figures", {"step_s": 1.0}), ("figures", {"loss": [2.0]})]))
    report.take(phase("a.py::x[one_card]", "skipped", "setup", longrepr=("a.py", 3, "Skipped: no CUDA device")))
    report.take(phase("a.py::x[cpu]", when="setup"))
    report.take(phase("", nodeid="tests/capture/test_x.py::y"))
    # Nothing ran on a card, and nobody asked: no file.
    assert report.write() is None and not list(tmp_path.iterdir())
    report.take(phase("a.py::z[one_card-graphpipe]", "failed", longrepr="def z():\n> assert 0\nE  assert 0"))
    assert report.write() == Path("gpu-report.json")
    found = json.loads((tmp_path / "gpu-report.json").read_text())
    assert found["outcomes"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert {"cards", "torch", "cuda", "rocm", "nccl", "commit", "cores", "python"} == set(found["machine"])
    tests = {name.removeprefix("tests/gpu/a.py::"): value for name, value in found["tests"].items()}
    assert tests["x[cpu]"] == {"outcome": "passed", "seconds": 1.25, "figures": {"step_s": 1.0, "loss": [2.0]}}
    assert tests["x[one_card]"]["reason"] == "no CUDA device"
    assert tests["z[one_card-graphpipe]"]["reason"] == "E  assert 0"
    asked = Report(tmp_path / "mine.json")
    asked.take(phase("a.py::x[cpu]"))
    assert asked.write() == tmp_path / "mine.json"


def test_places_follow_the_cards_that_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    def skipped(name: str) -> str:
        with pytest.raises(pytest.skip.Exception) as why:
            place_of(name)
        return str(why.value)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place_of(CPU).words(3) == ["cluster=local", "cluster.num_devices=3"]
    assert "no CUDA device" in skipped(ONE) and "no CUDA device" in skipped(ALL)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "one card only" in skipped(ALL)
    assert [place_of(ONE).shared(workers) for workers in (1, 2, 4)] == [1, 2, 4]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place_of(ALL).shared(workers) for workers in (2, 3, 4)] == [1, 2, 2]
    assert place_of(ONE).cards == 1
    said: list[Any] = []
    monkeypatch.setattr(places, "run_cold", lambda run_dir, *words, **env: said.append((words, env)))
    place_of(ONE).run(tmp_path, 2, "steps=3")
    place_of(ALL).run(tmp_path, 2, "steps=3")
    place_of(ALL).run(tmp_path, 2, "steps=3", engine="deepspeed")
    cards = ("logger=none", "cluster=local_gpus", "cluster.num_devices=2")
    assert said[0] == ((*cards, "engine=distributed", "steps=3", "engine.workers_per_card=2"), {"CUDA_VISIBLE_DEVICES": "0"})
    assert said[1] == ((*cards, "engine=distributed", "steps=3"), {})
    assert said[2] == ((*cards, "engine=deepspeed", "steps=3"), {})
    assert Place(name=CPU, cards=0).shared(4) == 1
