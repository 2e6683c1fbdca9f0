from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpp import Device, Profiled
from gpp.capture import kept_profile as kept
from gpp.capture import profiler
from gpp.capture.build import capture
from gpp.graph.coarsen.coarsen import coarsen
from gpp.optimizers import SGD

DEVICE = Device(kind="cpu", memory_bytes=1e9, peak_flop_per_s={"float32": 1e11}, memory_bandwidth_bytes_per_s=1e10)


class Towers(nn.Module):
    """Two towers over an embedding and over numbers; the first is much wider."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.wide = nn.Sequential(*(layer for size in (16, 1024, 1024) for layer in (nn.Linear(size, 1024), nn.ReLU())))
        self.narrow = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(1056, 4)

    def forward(self, word, numbers):
        return self.head(torch.cat([self.wide(self.table(word)), self.narrow(numbers)], dim=1))


@pytest.fixture(scope="module")
def captured():
    inputs = {"word": torch.zeros(4, dtype=torch.int64), "numbers": torch.zeros(4, 8)}
    with torch.device("meta"):
        model = Towers().train()
    return capture(model, inputs, {"label": torch.zeros(4, dtype=torch.int64)}, nn.functional.cross_entropy, {}, name="towers")


def test_every_operator_is_timed(captured):
    before = torch.get_num_threads()
    graph = coarsen(captured.graph, 12)
    profile = profiler.profile(captured, graph, sample_counts=(2, 16), budget_s=1.0)
    assert torch.get_num_threads() == before
    assert profile.sample_counts == (2, 16)
    assert len(profile.forward_s) == len(profile.backward_s) == graph.num_ops
    assert all(t > 0 for row in profile.forward_s for t in row)
    assert min(profile.pass_s) >= 0 and sum(profile.pass_s) > 0
    flops, times = [op.forward_flops for op in graph.ops], profile.at(16)
    took = [forward + backward for forward, backward in zip(times.forward_s, times.backward_s, strict=True)]
    heavy = flops.index(max(flops))
    light = [i for i in range(graph.num_ops) if flops[i] < flops[heavy] / 100]
    assert light and all(took[i] < took[heavy] for i in light)


@pytest.mark.parametrize(("pass_s", "budget_s", "repeats"), [(1e-3, 0.00325, 7), (1e-3, 1.0, 10), (0.5, 0.1, 2)])
def test_the_budget_bounds_the_repeats(pass_s, budget_s, repeats, monkeypatch):
    """On a clock that only the work moves: passes for twice the budget, at least two and at most ten."""
    now, made = [0.0], []

    def forward():
        now[0] += pass_s
        made.append(now[0])
        return []

    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0]))
    found = profiler._time_passes(forward, [], torch.device("cpu"), budget_s)
    assert (found.forward_s, found.backward_s) == (pytest.approx(pass_s), 0.0)
    assert len(made) == 2 + repeats  # after two to warm up


def test_equal_layers_are_timed_once(captured, monkeypatch):
    seen = []
    timed = profiler._row
    monkeypatch.setattr(profiler, "_row", lambda *args: seen.append(1) or timed(*args))
    graph = captured.graph
    profile = profiler.profile(captured, graph, sample_counts=(2,), budget_s=0.1)
    row = {op.name: (profile.forward_s[i], profile.backward_s[i]) for i, op in enumerate(graph.ops)}
    assert row["wide.2"] == row["wide.4"] != row["wide.0"]
    assert row["wide.1"] == row["wide.3"]
    assert len(seen) <= 3 * (graph.num_ops - 2)  # three rounds


def test_measured_once_then_read(captured, tmp_path, monkeypatch):
    graph = coarsen(captured.graph, 4)
    cost = Profiled(cache_dir=str(tmp_path), budget_s=0.1)
    first = kept.measured(cost, captured, graph, largest=4, optimizer=SGD(lr=0.1))
    assert first.profiles[0].sample_counts == (1, 2, 4)
    assert first.profiles[0].setting.optimizer == "SGD"
    assert 0 < first.update_s(1e6, DEVICE) < 1.0
    assert (first.op_times(graph, 3, DEVICE).forward_s > 0).all()
    with monkeypatch.context() as no_more:
        no_more.setattr(kept, "profile", lambda *args, **kwargs: pytest.fail("measured again"))
        assert kept.measured(cost, captured, graph, largest=2, optimizer=SGD(lr=0.1)) == first
    assert kept.measured(cost, captured, graph, largest=8, optimizer=SGD(lr=0.1)).profiles[0].sample_counts == (1, 2, 4, 8)


def test_a_profile_that_holds_no_more_is_taken_again(captured, tmp_path, monkeypatch):
    graph, said = coarsen(captured.graph, 4), []
    cost = Profiled(cache_dir=str(tmp_path), budget_s=0.1)
    monkeypatch.setattr(kept, "SPOTS_S", 0.02)
    monkeypatch.setattr(kept.Load, "share", lambda self: 0.0)
    (first,) = kept.measured(cost, captured, graph, largest=2).profiles
    assert len(first.spots) == 2 and all(spot.seconds > 0 for spot in first.spots)
    # It was taken while others used the machine, and all took three times as long.
    slow = replace(first, others=0.5, spots=tuple(replace(spot, seconds=3 * spot.seconds) for spot in first.spots))
    cost.store(graph, slow)
    assert kept.measured(cost, captured, graph, largest=2).profiles == (slow,)  # nobody asked
    (again,) = kept.measured(cost, captured, graph, largest=2, recheck=said.append).profiles
    assert again.others == 0.0 and again != slow
    assert len(said) == 1 and "while other programs had 50% of the processors (0% now): it is taken again" in said[0]
