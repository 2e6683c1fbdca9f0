"""Plan values of the public tools, and a second opinion on plans that shares no code with the planners."""

from __future__ import annotations

import math
from pathlib import Path

from gpp.formats.profiles import read_profile
from gpp.graph.op_graph import OpGraph

PROFILES = Path(__file__).parent / "profiles"
GIB = 2**30

# Measured with the released tools; the digits that they were noted with.
PIPEDREAM = {  # 1 GB/s between any two machines, activation_compression_ratio 1
    "pipedream_vgg16": {4: ".20552", 8: ".10383", 16: ".05653", 32: ".02845", 64: ".02569"},
    "pipedream_gnmt": {4: ".02587", 8: ".01929", 16: ".01929", 32: ".01407", 64: ".01258"},
    "pipedream_alexnet": {4: ".03422", 8: ".01887", 16: ".01887", 32: ".01887", 64: ".01127"},
}
PIPER_BERT = {8: ".16586", 16: ".08296", 32: ".04152", 64: ".02020", 128: ".01012", 256: ".005081", 512: ".002561"}
# (graph, linearised): values at 4, 8, 16, 32 devices, 25 GB/s, 16 GB, N = 64
PIPEDREAM_BRANCHES = {
    ("b2x16", False): (".125970", ".066000", ".036921", ".019608"),
    ("b2x16", True): (".130770", ".069360", ".037263", ".019825"),
    ("b4x8", False): (".141360",),
    ("b4x8", True): (".144960", ".075900", ".040800", ".022218"),
}
PIPER_BRANCHES = {
    ("b2x16", False): (".127272", ".064229", ".032546", ".016577"),
    ("b2x16", True): (".127366", ".064696", ".033077", ".017088"),
    ("b4x8", False): (".143458", ".072678", ".036899", ".018819"),
    ("b4x8", True): (".143458", ".073213", ".037334", ".019145"),
}


def profile(name: str) -> OpGraph:
    """A profile by file name; without an ending the graph.txt."""
    return read_profile(PROFILES / (name if "." in name else f"{name}.graph.txt"))


def agrees(value: float, printed: str) -> bool:
    """Whether a value rounds to what was printed."""
    return abs(value - float(printed)) <= 0.5000001 * 10.0 ** -len(printed.lstrip("."))


def edges_of(graph: OpGraph) -> dict[tuple[int, int], float]:
    return {(t.producer, c): t.bytes_per_sample for t in graph.tensors for c in t.consumers}


def check_chain(graph: OpGraph, stages: list[tuple[tuple[int, ...], int]]) -> dict[int, int]:
    """Stage of each operator; every operator once, every edge forward."""
    stage_of = {op: s for s, (ops, _) in enumerate(stages) for op in ops}
    assert len(stage_of) == sum(len(ops) for ops, _ in stages)
    assert all(stage_of[a] <= stage_of[b] for a, b in edges_of(graph) if a in stage_of and b in stage_of)
    return stage_of


def params(graph: OpGraph, ops: tuple[int, ...]) -> float:
    return float(sum(graph.param_of[name].num_bytes for op in ops for name in graph.ops[op].params))


def seconds(graph: OpGraph, ops: tuple[int, ...]) -> float:
    return sum(graph.ops[op].forward_flops + graph.ops[op].backward_flops for op in ops)


def piper_s(graph: OpGraph, stages: list[tuple[tuple[int, ...], int]], bandwidth: float, count: int) -> float:
    """Piper's objective of a plan without tensor parallelism and recomputation: the sum of its terms at the slowest stage."""
    stage_of, worst = check_chain(graph, stages), 0.0
    for s, (ops, d) in enumerate(stages):
        cut = sum(size for (a, b), size in edges_of(graph).items() if (stage_of[a] == s) != (stage_of[b] == s))
        sync = 4 * (d - 1) * params(graph, ops) / d / count / bandwidth
        worst = max(worst, seconds(graph, ops) / d + 2 * cut / d / bandwidth + sync)
    return worst


def piper_bytes(graph: OpGraph, stages: list[tuple[tuple[int, ...], int]]) -> float:
    """Largest memory of a device by Piper's reckoning, nothing recomputed."""
    behind, worst = sum(d for _, d in stages), 0.0
    for ops, d in stages:
        kept = sum(graph.ops[op].saved_bytes for op in ops)
        worst = max(worst, kept * math.ceil(behind / d) + 2 * params(graph, ops))
        behind -= d
    return worst


def pipedream_s(graph: OpGraph, stages: list[tuple[tuple[int, ...], int]], bandwidth: float) -> float:
    """PipeDream's objective of a plan: the largest of its terms; outputs count while a reader is behind the cut."""
    stage_of, worst = check_chain(graph, stages), 0.0
    size = {t.producer: t.bytes_per_sample for t in graph.tensors}
    for s, (ops, d) in enumerate(stages):
        worst = max(worst, (seconds(graph, ops) + 4 * (d - 1) * params(graph, ops) / (d * bandwidth)) / d)
        if s:
            crossing = {a for a, b in edges_of(graph) if stage_of.get(a, s) < s <= stage_of.get(b, -1)}
            moved = 2 * sum(size[a] for a in crossing) / bandwidth
            worst = max(worst, moved / d)
    return worst
