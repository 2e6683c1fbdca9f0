"""Profiles of other tools read as they are, and what is said of bad ones."""

from __future__ import annotations

import json
import re

import pytest

from gpp.errors import InvalidConfig
from gpp.formats.profiles import read_profile
from tests.support.published import PROFILES, profile


@pytest.mark.parametrize(
    ("name", "num_ops", "seconds"),
    [
        ("pipedream_vgg16.graph.txt", 40, 0.672535),
        ("pipedream_alexnet.graph.txt", 22, 0.085321),
        ("pipedream_gnmt.graph.txt", 37, 0.089416),
        ("pipedream_inception_v3.graph.txt", 325, 0.689038),
        ("piper_bert32a100.json", 37, 0.972864),
        ("b4x8.graph.txt", 36, 0.56493),
        ("b4x8.json", 36, 0.56493),
        ("b4x8.piper.json", 36, 0.56493),
    ],
)
def test_operators_and_times(name, num_ops, seconds):
    graph = profile(name)
    assert graph.num_ops == num_ops
    assert sum(op.forward_flops + op.backward_flops for op in graph.ops) == pytest.approx(seconds)


def test_inputs_and_unused_items_are_left_out():
    """As PipeDream's optimizer does: nodes called Input, and outputs of a tuple that nobody reads."""
    kinds = [op.kind for op in profile("pipedream_gnmt").ops]
    assert not any("Input" in kind for kind in kinds)
    assert sum("LSTM" in kind for kind in kinds) == 7


def test_three_formats_are_one_graph():
    plain, piper, text = (profile(f"b2x16{ending}") for ending in (".json", ".piper.json", ".graph.txt"))
    assert [op.name for op in plain.ops] == [op.name for op in piper.ops]
    assert plain.tensors == piper.tensors and plain.params == piper.params
    assert plain.successors == text.successors
    # The stem's tensor has two readers: one tensor, whichever way it is written.
    assert plain.tensors[0].consumers == (1, 17)


def test_declared_ways_give_back_what_the_file_says():
    graph = profile("piper_bert32a100.json")
    content = json.loads((PROFILES / "piper_bert32a100.json").read_text())
    entry = next(node for node in content["nodes"] if node["id"] == 5)
    op = next(op for op in graph.ops if op.name.endswith(".5"))
    total = op.forward_flops + op.backward_flops
    weight = graph.param_of[op.params[0]].num_bytes
    assert total == pytest.approx(entry["TMPCs"]["1"][0]["timePerSample"])
    for variant in op.variants:
        way = entry["TMPCs"][str(variant.degree)][variant.recompute]
        assert (variant.forward + variant.backward) * total == pytest.approx(way["timePerSample"])
        assert variant.params * weight == pytest.approx(way["parameterSize"])
        assert variant.saved_bytes == way["memoryUsageA"]
        assert variant.extra_bytes + 2 * way["parameterSize"] == pytest.approx(way["memoryUsageB"])
        assert sum(size for _, size in variant.receive) == sum(way["syncTimeFw"].values())
    # The forward pass is what recomputation adds.
    assert op.forward_flops == pytest.approx(0.040657 - 0.030474)


def test_milliseconds_on_request(tmp_path):
    graph = read_profile(PROFILES / "b2x16.piper.json", seconds=1e-3)
    assert sum(op.forward_flops + op.backward_flops for op in graph.ops) == pytest.approx(0.50157e-3)


AMOUNTS = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[8.0; 4.0], parameter_size=16.0"
NODE = f"node1 -- Conv2d(3, 4) -- {AMOUNTS}\n"
PLAIN = '{"nodes": [{"id": 0, "fwd_ms": 2.5, "bwd_ms": 1, "param_bytes": 1, "activation_bytes": 1}], "edges": []}'
TMPC = {"id": "vanilla", "timePerSample": 1.0, "parameterSize": 4.0, "memoryUsageA": 1.0, "memoryUsageB": 8.0}


def piper(**changes) -> str:
    way = {**TMPC, "syncTimeFw": {}, "syncTimeBw": {}, **changes}
    return json.dumps({"nodes": [{"id": 0, "TMPCs": {"1": [way]}}], "edges": []})


def test_several_outputs_are_added_up(tmp_path):
    (tmp_path / "graph.txt").write_text(NODE)
    graph = read_profile(tmp_path / "graph.txt")
    assert graph.tensors[0].bytes_per_sample == 12.0 and graph.ops[0].name == "node1.Conv2d"
    assert (graph.ops[0].forward_flops, graph.ops[0].backward_flops) == (1e-3, 2e-3)


@pytest.mark.parametrize(
    ("text", "where", "rule"),
    [
        ("hello\n", ":1", "neither a node"),
        (NODE.replace("activation_size", "size"), "graph.txt:1", "activation_size.*missing"),
        (NODE.replace("16.0", "many"), ":1", "parameter_size=many.*number"),
        (NODE.replace("16.0", "-1"), ":1 parameter_size", "at least 0"),
        (NODE + NODE, ":2", "twice"),
        (NODE + "\tnode1 -- node7\n", ":2", "given above"),
        (NODE + NODE.replace("node1", "node2") + "\tnode1 -- node2\n\tnode2 -- node1\n", "graph.txt", "cycle"),
        ("", ":|graph.txt", "one operator"),
        ("{", ":1", "is no JSON"),
        ("{}", "nodes", "missing"),
        ('{"nodes": [], "edges": []}', "nodes", "at least 1 item"),
        (PLAIN.replace("bwd_ms", "ms"), r"nodes\[0\]", "bwd_ms.*missing"),
        (PLAIN.replace("2.5", '"a"'), "fwd_ms", "number"),
        (PLAIN.replace("[]", "[[0, 1, 2]]"), r"edges\[0\]", "not given"),
        (piper(timePerSample=-1), r"TMPCs\.1\[0\]\.timePerSample", "at least 0"),
        (piper(id="activation recomp"), r"nodes\[0\]", "lacks the vanilla way"),
        (piper().replace('"1"', '"one"'), "TMPCs", "number of devices"),
        (piper().replace("memoryUsageA", "memory"), "TMPCs.1", "memoryUsageA.*missing"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path, text, where, rule):
    (tmp_path / "graph.txt").write_text(text)
    with pytest.raises(InvalidConfig, match=where) as caught:
        read_profile(tmp_path / "graph.txt")
    assert re.search(rule, str(caught.value)) and "Fix:" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidConfig, match=r"model\.path"):
        read_profile(tmp_path / "none.txt")
