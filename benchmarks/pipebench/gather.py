"""Writes the sixty problems: profiles that others measured, models that were captured here, and random graphs.

    python -m benchmarks.pipebench.gather       writes benchmarks/pipebench/problems/*.json anew

Only this file and `planners.py` need the platform; a problem is plain JSON and stands alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import gpp.app.multirun  # noqa: F401  # the functions that YAML files call
from gpp.formats.profiles import read_profile
from gpp.graph.coarsen.coarsen import coarsen
from gpp.graph.op_graph import OpGraph
from gpp.graph.random_graphs import random_dag, random_series_parallel

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PROFILES = ROOT / "tests" / "support" / "profiles"
MOST_OPS = 24
"""Operators of a problem: enough for its shape, and few enough for a proof by a mixed-integer program in a minute."""

MEASURED: dict[str, str] = {
    "pipedream_vgg16": "msr-fiddle/pipedream at 7db6a1c, profiler/ (MIT licence, Microsoft)",
    "pipedream_alexnet": "msr-fiddle/pipedream at 7db6a1c, profiler/ (MIT licence, Microsoft)",
    "pipedream_gnmt": "msr-fiddle/pipedream at 7db6a1c, profiler/ (MIT licence, Microsoft)",
    "pipedream_inception_v3": "msr-fiddle/pipedream at 7db6a1c, profiler/ (MIT licence, Microsoft)",
    "piper_bert32a100": "msr-fiddle/piper at d7fc8cf, inputs/ (MIT licence, Microsoft)",
    "b2x16": "two branches of sixteen operators between a stem and heads, made for the comparison of both tools",
    "b4x8": "four branches of eight operators between a stem and heads, made for the comparison of both tools",
}
"""Profiles and their sources."""

CAPTURED: tuple[tuple[str, str, int, int], ...] = (
    ("gpt_small", "summit_1x4", 4, 32),
    ("bert_small", "summit_1x4", 4, 32),
    ("mmt", "summit_2x4", 8, 64),
    ("dlrm", "summit_2x4", 8, 256),
    ("candle_uno", "summit_1x4", 4, 512),
    ("candle_uno", "summit_2x4", 8, 1024),
    ("case_study", "summit_1x4", 4, 128),
    ("clip_small", "summit_1x4", 4, 32),
    ("bridge_tower_small", "summit_1x4", 4, 32),
    ("inception", "summit_1x4", 4, 64),
    ("googlenet", "summit_1x4", 4, 64),
    ("unet_small", "summit_1x4", 4, 32),
    ("vgg16", "summit_1x4", 4, 64),
    ("alexnet", "summit_1x4", 4, 128),
    ("t5_large", "summit_2x4", 8, 32),
)
"""Model, cluster that times its operators, devices and mini-batch."""


def plain(graph: OpGraph, times: list[tuple[float, float]], *, name: str, source: str, **given: Any) -> dict[str, Any]:
    """A problem as PipeBench has it.

    Args:
        times: forward and backward seconds of each operator for a sample.
    """
    size = {param.name: param.num_bytes for param in graph.params}
    seen: set[str] = set()
    operators = []
    for op, (forward, backward) in zip(graph.ops, times, strict=True):
        own = [p for p in op.params if p not in seen]  # a tied weight counts with its first reader
        seen.update(own)
        figures = {"forward": float(f"{forward:.6g}"), "backward": float(f"{backward:.6g}"), "saved": round(op.saved_bytes)}
        operators.append({"name": op.name, **figures, "parameters": sum(size[p] for p in own)})
    tensors = [
        {"from": t.producer, "to": list(t.consumers), "bytes": round(t.bytes_per_sample), "stored": t.saved}
        for t in graph.tensors
        if t.consumers
    ]
    return {"name": name, "source": source, **given, "operators": operators, "tensors": tensors}


def seconds_of(graph: OpGraph) -> list[tuple[float, float]]:
    """The times of a graph whose FLOPs are seconds."""
    return [(op.forward_flops, op.backward_flops) for op in graph.ops]


def needed(problem: dict[str, Any], share: float) -> int:
    """Bytes of a device: so many times what an equal part of everything takes, with a micro-batch in flight for each device."""
    fixed = problem["weight_copies"] * sum(op["parameters"] for op in problem["operators"])
    flight = sum(op["saved"] for op in problem["operators"]) + sum(t["bytes"] for t in problem["tensors"])
    unit = max(1, problem["minibatch"] // (4 * problem["devices"]))
    return round(share * (fixed / problem["devices"] + unit * flight))


def profiled() -> Iterator[dict[str, Any]]:
    """Those of profiles: a sample is a micro-batch of the profile."""
    for stem, source in MEASURED.items():
        (path,) = PROFILES.glob(f"{stem}.graph.txt") if stem.startswith("pipedream") else PROFILES.glob(f"{stem}.json")
        graph = coarsen(read_profile(path), MOST_OPS)
        for devices in (4, 8, 16):
            given = {"minibatch": 4 * devices, "devices": devices, "max_replicas": devices, "bandwidth": 25e9, "latency": 1e-5}
            name = f"{stem}_{devices}"
            found = plain(graph, seconds_of(graph), name=name, source=source, memory=0, weight_copies=2, **given)
            yield {**found, "memory": needed(found, 1e3 if devices == 4 else 2.0)}
    for path in sorted((ROOT / "sweeps" / "zero_bubble").glob("*.json")):
        graph = coarsen(read_profile(path), MOST_OPS)
        count, devices = int(path.stem.rpartition("_")[2]), 8 if "1.5b" in path.stem else 16
        source = "Qi et al., arXiv 2401.10241, Table 9: seconds of the passes, a third of a stage in each operator"
        given = {"minibatch": count, "devices": devices, "max_replicas": 1, "bandwidth": 1e9, "latency": 0.0}
        given |= {"memory": 10**12, "weight_copies": 2}
        yield plain(graph, seconds_of(graph), name=f"zero_bubble_{path.stem}", source=source, **given)


def captured() -> Iterator[dict[str, Any]]:
    """Those of models of the platform; times by its analytical model at an eighth of the mini-batch."""
    for model, cluster, devices, minibatch in CAPTURED:
        words = [
            "hydra.searchpath=[file://sweeps]",
            f"model={model}",
            f"cluster={cluster}",
            f"minibatch_size={minibatch}",
            "cost=analytical",
            "mode=plan",
        ]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose(
                "config", overrides=["strategies=[]", "name=pipebench", "logger=none", f"graph.max_ops={MOST_OPS}", *words]
            )
        one = instantiate(cfg, _convert_="all")
        whole = one.captured()
        posed = one.problem(whole, one.op_graph(whole))
        size = max(1, minibatch // 8)
        found = posed.op_times(size, 0)
        times = [(f / size, b / size) for f, b in zip(found.forward_s.tolist(), found.backward_s.tolist(), strict=True)]
        link = posed.cluster.intra_node
        given = {"minibatch": minibatch, "devices": devices, "max_replicas": devices}
        given |= {"bandwidth": link.bandwidth_bytes_per_s, "latency": link.latency_s}
        yield plain(
            posed.graph,
            times,
            name=f"captured_{model}_{devices}",
            source=f"model={model}, captured; the analytical cost model on {cluster}",
            memory=round(posed.memory_limit_bytes),
            weight_copies=4,
            **given,
        )


def drawn() -> Iterator[dict[str, Any]]:
    """Random ones, half of them not series-parallel, of several tightnesses."""
    for number in range(18):
        rng = random.Random(f"pipebench {number}")
        ops, devices = rng.choice([6, 8, 12, 16, 20, 24]), rng.choice([2, 3, 4, 6, 8])
        make = random_dag if number % 2 else random_series_parallel
        graph = make(ops, number, skew=rng.choice([0.0, 0.5, 1.0]))
        times = [(op.forward_flops / 1e13, op.backward_flops / 1e13) for op in graph.ops]
        given = {"minibatch": rng.choice([8, 12, 16, 24]), "devices": devices, "max_replicas": devices, "latency": 1e-5}
        found = plain(
            graph,
            times,
            name=f"random_{number:02}",
            source=f"gpp.graph.random_graphs.{make.__name__}({ops}, {number})",
            memory=0,
            weight_copies=4,
            bandwidth=rng.choice([1e9, 1e10, 1e11]),
            **given,
        )
        yield {**found, "memory": needed(found, rng.choice([1.0, 1.5, 3.0, 100.0]))}


def main() -> None:
    """Writes all of them."""
    folder = HERE / "problems"
    folder.mkdir(exist_ok=True)
    names = []
    for each in (profiled, captured, drawn):
        for problem in each():
            names.append(problem["name"])
            lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in problem.items() if k not in ("operators", "tensors")]
            for what in ("operators", "tensors"):
                rows = ",\n  ".join(json.dumps(row) for row in problem[what])
                lines.append(f' "{what}": [\n  {rows}\n ]')
            (folder / f"{problem['name']}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(names)} problems, {len(set(names))} names")


if __name__ == "__main__":
    main()
