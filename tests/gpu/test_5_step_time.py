"""Last: the time of a step beside that of torch.distributed.pipelining and DeepSpeed, on the same chain of stages."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.places import CPU, EVERYWHERE, Place

ENGINES = ["distributed", "torch_pipelining", "deepspeed"]


@pytest.mark.dist
@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step(place: Place, engine: str, tmp_path: Path, figure: Callable[..., None]) -> None:
    workers = 4 if place.on_card else 2
    if engine != "distributed" and place.shared(workers) > 1:
        pytest.skip(f"{place.cards} card(s) for {workers} workers: {engine} has NCCL alone, which refuses two ranks on one card")
    if engine == "deepspeed" and not find_spec("deepspeed"):
        pytest.skip("pip install -e '.[deepspeed]'")
    if engine != "distributed" and place.name == CPU:
        pytest.skip("tests/baselines trains with it on processors")
    size = ["model=gpt_small", "steps=60", "minibatch_size=128"] if place.on_card else ["model=mlp", "steps=4"]
    words = [*size, "strategy=even", "cost=analytical", "evaluate_every=0", "microbatch_size=8"]
    done = place.run(tmp_path / "run", workers, *words, engine=engine)
    assert done.code == 0, done.out
    measured = done.result["measured"]
    figure(
        engine=engine,
        workers_per_card=place.shared(workers),
        iteration_s=measured["iteration_s"],
        throughput_samples_per_s=measured["throughput_samples_per_s"],
        peak_memory_bytes=measured["peak_memory_bytes"],
    )
    assert measured["iteration_s"] > 0
