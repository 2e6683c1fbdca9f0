"""PipeEdge's files: what they mean, what is refused by file and place, and what is written for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpp.errors import InvalidConfig, InvalidFile
from gpp.formats.pipeedge.files import read_hosts, read_model, read_types, schedule_text, times_by_type
from gpp.formats.pipeedge.graph import cluster
from gpp.formats.pipeedge.written import measured_files
from gpp.formats.pipeedge.yaml import read_yaml
from gpp.models.pipeedge import PipeEdge
from tests.checks.edgepipe import random_served

MODELS = """
net:
  layers: 3
  mem_MB: [1, 2.5, 1e1]
  parameters_in: 10
  parameters_out: [4, 8]
"""
TYPES = """
board: {bw_Mbps: 8, mem_MB: 100, model_profiles: {net: [
  {batch_size: 2, dtype: torch.float32, time_s: [.5, 1, 2.0]}, {batch_size: 4, dtype: torch.float32, time_s: [1, 2, 4]}]}}
plain: {bw_Mbps: 16, mem_MB: 50, model_profiles: }
"""
HOSTS = "board: [10.0.0.1, 'b']\nplain: []\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in (("models.yml", MODELS), ("types.yml", TYPES), ("devices.yml", HOSTS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def model(files: Path, **settings: object) -> PipeEdge:
    given = {"entry": "net", "batch": 2, "types": str(files / "types.yml")} | settings
    return PipeEdge(name="pipeedge", loss="none", path=str(files / "models.yml"), **given)  # type: ignore[arg-type]


def test_what_the_files_say(files):
    graph, times = model(files).captured().graph, model(files).times
    assert [param.num_bytes for param in graph.params] == [1_000_000, 2_500_000, 10_000_000]
    # A list of messages that is shorter than the layers is repeated.
    assert [tensor.bytes_per_sample for tensor in graph.tensors] == [16, 32, 16] and graph.inputs[0].bytes_per_sample == 40
    assert not graph.differentiated
    found = cluster(types=str(files / "types.yml"), devices=str(files / "devices.yml"))
    assert found.hosts == ("10.0.0.1", "b") and found.devices[0].memory_bytes == 1e8
    assert found.link(0, 1).bandwidth_bytes_per_s == 1e6
    assert times.op_times(graph, 2, found.devices[0]).forward_s.tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("models.yml", MODELS.replace("2.5, ", ""), r"net\.mem_MB.*has 2 entries for a model of 3 layers"),
        ("models.yml", MODELS.replace("[4, 8]", "[4, 8, 8, 4]"), r"net\.parameters_out.*has 4 entries"),
        ("models.yml", MODELS.replace("layers: 3", "layers: 0"), r"net\.layers=0: must be at least 1"),
        ("models.yml", MODELS.replace("layers: 3", "layers: three"), r"layers=three: must be an integer"),
        ("models.yml", MODELS + "net: {}\n", r":7:1: is given twice: net"),
        ("models.yml", "net: &a [*a]", r"anchor"),
        ("models.yml", "net: !!python/name:os.system x", r"tag"),
        ("models.yml", "a: 1\n---\nb: 2", r"second document"),
        ("models.yml", "[" * 500, r"nested more than 100"),
        ("models.yml", "[" * 5000, r"nested more than 100|maximum nesting depth"),  # PyYAML 6.0.4 stops before we can
        ("models.yml", "net: {", r"is no YAML"),
        ("types.yml", TYPES.replace("time_s: [.5, 1, 2.0]", "time_s: [1]"), r"board\.model_profiles\.net: time_s.*has 1 entries"),
        ("types.yml", TYPES.replace("torch.float32", "torch.float64"), r"has no profile of net in torch\.float32"),
    ],
)
def test_wrong_models_and_types_are_refused(files, file, text, said):
    (files / file).write_text(text)
    with pytest.raises(InvalidFile, match=said) as caught:
        model(files)
    assert file in str(caught.value) and "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"entry": "other"}, r"model\.key=.*Fix: one of net"),
        ({"batch": 8}, r"microbatch_size=8: has no profile.*Fix: set microbatch_size=4"),
        ({"batch": None}, r"microbatch_size=null: must be one of the profiled sizes, 2, 4"),
        ({"types": None}, r"model\.types=null"),
    ],
)
def test_wrong_settings_are_refused(files, settings, said):
    with pytest.raises(InvalidConfig, match=said):
        model(files, **settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RCC-VE-C2558: [rcc-0]", r"RCC-VE-C2558: is no type of .*which has board, plain"),
        ("board: []\nplain:\n", r"names no host"),
        ("board: [a, a]", r"names the host a twice"),
        ("board: {a: b}", r"must be a list"),
    ],
)
def test_wrong_hosts_are_refused(files, text, said):
    (files / "devices.yml").write_text(text)
    with pytest.raises(InvalidFile, match=said):
        cluster(types=str(files / "types.yml"), devices=str(files / "devices.yml"))


@pytest.mark.parametrize(("given", "said"), [("bw_Mbps: 8", "board.bw_Mbps=0.0"), ("mem_MB: 100", "board.mem_MB=0.0")])
def test_a_type_with_hosts_needs_a_rate_and_memory(files, given, said):
    (files / "types.yml").write_text(TYPES.replace(given, given.partition(":")[0] + ": 0"))
    with pytest.raises(InvalidFile, match=rf"cluster\.types=.*{said}: must be above 0"):
        cluster(types=str(files / "types.yml"), devices=str(files / "devices.yml"))


def test_a_type_that_was_not_timed_is_refused_with_its_hosts(files):
    (files / "devices.yml").write_text("plain: [c]")
    found = cluster(types=str(files / "types.yml"), devices=str(files / "devices.yml"))
    own = model(files)
    with pytest.raises(InvalidConfig, match=r"cluster\.devices=plain: is a type of which types\.yml has no times"):
        own.times.op_times(own.captured().graph, 2, found.devices[0])
    with pytest.raises(InvalidConfig, match=r"cluster\.device\.name=null: .*use cluster=pipeedge, or name one of board"):
        own.times.op_times(own.captured().graph, 2, replace(found.devices[0], name=None))


def test_what_is_measured_is_read_back(tmp_path):
    problem, _ = random_served("graph", 3)
    b = problem.microbatch_size or 0
    for name, text in measured_files(problem, "my net", b).items():
        (tmp_path / name).write_text(text)
    entry = read_model(tmp_path / "models.yml", "my net")
    assert entry.layers == problem.graph.num_ops == len(entry.mem_mb)
    own = problem.op_times(b, 0).forward_s
    (kind,) = read_types(tmp_path / "device_types.yml", setting="model.types")
    size, times = times_by_type(tmp_path / "device_types.yml", "my net", entry.layers, "float32", b)
    assert size == b and times[kind] == pytest.approx(own.tolist())
    (tmp_path / "schedule.yml").write_text(schedule_text([("a", 1, 2), ("7", 3, 3)]))
    assert read_yaml(list[dict[str, list[int]]], tmp_path / "schedule.yml", setting="") == [{"a": [1, 2]}, {"7": [3, 3]}]
    (tmp_path / "devices.yml").write_text(f"{kind}: [a]")
    known = read_types(tmp_path / "device_types.yml", setting="model.types")
    assert read_hosts(tmp_path / "devices.yml", known, "device_types.yml") == {kind: ("a",)}
