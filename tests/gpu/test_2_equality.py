"""Second: what a card trains is what one processor trains, to the last digits that float64 has."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpp.capture import profiler
from gpp.graph.coarsen.coarsen import coarsen
from tests.gpu.places import ALL, CPU, ONE, SELDOM, Place
from tests.runtime.test_processes import COMMON, check_against_one_device
from tests.support import inprocess

CASES = [
    ("digits", 2, ()),
    ("digits", 4, ()),
    ("mmt_small", 3, ("strategy=sequential",)),
    ("dlrm_small", 4, ("strategy.planner.replication=true",)),
    ("gpt_small", 2, ("model.tied=true", "optimizer.clip_norm=0.01")),
    ("resnet_small", 2, ()),
]


@pytest.mark.dist
@pytest.mark.parametrize("place", [ONE, ALL], indirect=True)
@pytest.mark.parametrize(("name", "workers", "words"), CASES)
@pytest.mark.gpu
def test_losses_and_weights_of_one_processor(
    place: Place, name: str, workers: int, words: tuple[str, ...], tmp_path: Path, figure: Callable[..., None]
) -> None:
    same(place, name, workers, words, tmp_path, figure)


@pytest.mark.long  # tests/runtime/test_processes.py runs other models without cards
@pytest.mark.dist
@pytest.mark.parametrize("place", [CPU], indirect=True)
def test_the_same_without_a_card(place: Place, tmp_path: Path, figure: Callable[..., None]) -> None:
    same(place, "digits", 2, inprocess.few_layers("digits"), tmp_path, figure)


def same(place: Place, name: str, workers: int, words: tuple[str, ...], tmp_path: Path, figure: Callable[..., None]) -> None:
    base = [word for word in COMMON if not word.startswith("cost=")]
    done = place.run(tmp_path / "run", workers, *base, "cost=analytical", f"model={name}", "graph.max_ops=24", *words)
    check_against_one_device(done, name, *(word for word in words if word.startswith("model.")))
    figure(workers=workers, workers_per_card=place.shared(workers), loss=done.result["loss"])
    assert ("workers share a card" in done.out) == (place.shared(workers) > 1)


@pytest.mark.dist
@pytest.mark.parametrize("place", SELDOM, indirect=True)
@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_narrow_types_learn(place: Place, autocast: str, tmp_path: Path, figure: Callable[..., None]) -> None:
    if not place.on_card and autocast == "float16":
        pytest.skip("a processor's float16 is a hundred times slower; tests/runtime/test_loss_scale.py has its rules")
    steps = 60 if place.on_card else 20
    words = ["model=mlp", "cost=analytical", f"steps={steps}", "evaluate_every=0", f"engine.autocast={autocast}"]
    done = place.run(tmp_path / "run", 2, *words, "microbatch_size=16")
    assert done.code == 0, done.out
    loss = done.result["loss"]
    assert sum(loss[-5:]) < sum(loss[:5])
    figure(loss=loss)


@pytest.mark.parametrize(
    "place", [pytest.param(CPU, marks=pytest.mark.long), pytest.param(ONE, marks=pytest.mark.gpu)], indirect=True
)
def test_operators_are_timed(place: Place, figure: Callable[..., None]) -> None:
    captured = inprocess.captured_named("digits")[1]
    device = "cuda" if place.on_card else "cpu"
    counts = (2, 64) if place.on_card else (2,)
    graph = coarsen(captured.graph, 4)
    found = profiler.profile(captured, graph, sample_counts=counts, device=device, budget_s=1.0 if place.on_card else 0.1)
    assert found.setting.device_kind == device
    assert all(t > 0 for row in found.forward_s for t in row)
    name = torch.cuda.get_device_name() if place.on_card else "cpu"
    figure(device=name, forward_s=[row[-1] for row in found.forward_s])
