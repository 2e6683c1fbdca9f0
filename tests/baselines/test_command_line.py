"""`strategy=` brings the baseline's engine, `engine=` and a cluster that is not here take it away again."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from gpp.app.cli import CONF
from tests.support.cli import run

ENGINES = ["data_parallel", "deepspeed", "single", "torch_pipelining"]


def engine_of(*words: str) -> str:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*words, "name=test"]).engine.name


@pytest.mark.parametrize("name", ENGINES)
def test_a_strategy_brings_its_engine(name: str) -> None:
    assert engine_of(f"strategy={name}") == name


def test_an_engine_and_a_cluster_that_is_not_here_come_first() -> None:
    assert engine_of("strategy=graphpipe", "engine=deepspeed") == "deepspeed"
    assert engine_of("strategy=single", "engine=distributed") == "distributed"
    assert engine_of("strategy=data_parallel", "cluster=summit_1x4") == "simulate"


def results_of(sweep: Path) -> list[dict[str, Any]]:
    """The results of a sweep's jobs, in its order."""
    jobs = json.loads((sweep / "jobs.json").read_text())
    return [json.loads((sweep / job["folder"] / "result.json").read_text()) for job in jobs]


@pytest.mark.long
@pytest.mark.dist
def test_one_command_runs_them_all(tmp_path: Path) -> None:
    """The same losses from every engine, and a table of them all."""
    done = run(
        tmp_path,
        "-m",
        f"strategy={','.join(ENGINES)},graphpipe",
        "model=mlp",
        "model.width=16",
        "dtype=float64",
        "cost=analytical",
        "cluster.num_devices=2",
        "minibatch_size=16",
        "microbatch_size=4",
        "steps=3",
        "logger=none",
    )
    assert done.code == 0, done.out
    results = results_of(tmp_path)
    assert [result["strategy"] for result in results] == [*ENGINES, "graphpipe"]
    assert [result["engine"] for result in results] == [*ENGINES, "distributed"]
    for result in results:
        assert result["status"] == "ok" and result["loss"] == pytest.approx(results[2]["loss"], abs=1e-9)
        assert result["final_metric"] == pytest.approx(results[2]["final_metric"], abs=1e-9)
        assert result["measured"]["iteration_s"] > 0 and result["predicted"]["iteration_s"] > 0
    assert (tmp_path / "summary.json").is_file() and (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("engines", [("deepspeed", "torch_pipelining"), pytest.param(tuple(ENGINES), marks=pytest.mark.long)])
def test_they_are_simulated_too(engines: tuple[str, ...], tmp_path: Path) -> None:
    words = [
        "-m",
        f"strategy={','.join(engines)}",
        "engine=simulate",
        "model=mlp",
        "model.num_blocks=2",
        "cost=analytical",
        "cluster.num_devices=2",
    ]
    done = run(tmp_path, *words, "logger=none")
    assert done.code == 0, done.out
    results = dict(zip(engines, results_of(tmp_path), strict=True))
    assert {engine: result["plan"]["num_devices"] for engine, result in results.items()} == {
        engine: 1 if engine == "single" else 2 for engine in engines
    }
    assert all(result["measured"] is None for result in results.values())
    # A chain is a chain, whoever runs it.
    assert results["deepspeed"]["predicted"] == results["torch_pipelining"]["predicted"]
