"""How long planning, simulating and a step of the runtime take in two checkouts, one after the other case by case."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.same.cases import MODELS, words_for
from tests.same.record import Server

PLAN = "engine=simulate cost=analytical logger=none mode=plan explain_s=0"
CLUSTERS = ("summit_1x4", "summit_2x4", "summit_8x4")
SMALL_GRAPHS = tuple(
    f"model=random model.kind={kind} model.graph_seed={seed} graph.max_ops={max_ops} cluster=summit_8x4"
    for kind in ("series_parallel", "dag", "towers")
    for max_ops, seed in ((13, 0), (13, 1), (20, 0), (32, 0))
)
"""Fewer operators than devices, or as many: most stages are replicated."""
CHAIN = (
    "model=mlp model.num_blocks=32 model.width=64 graph.max_ops=32 cluster=summit_8x4 strategy=even minibatch_size=512 "
    f"microbatch_size=1 {PLAN}"
)
"""32 stages of 512 micro-batches."""
RUNTIME = (
    "model=mlp cluster=local cluster.num_devices=2 cluster.memory_bytes=4e9 strategy=sequential engine=distributed cost=analytical "
    "logger=none optimizer=sgd optimizer.momentum=0.0 data.num_samples=2048 data.num_test_samples=64 microbatch_size=64 steps=20 "
    "evaluate_every=0 final_weights=false"
)


def searches() -> list[str]:
    """All models on 4, 8 and 32 devices, and small graphs on 32, planned by `graphpipe`."""
    cases = [f"model={model} cluster={cluster}" for model in MODELS if model != "random" for cluster in CLUSTERS]
    return [f"{case} strategy=graphpipe {PLAN}" for case in [*cases, *SMALL_GRAPHS]]


def steps() -> list[str]:
    """The chain of `sweeps/runtime_overhead.yaml`, 4 to 32 micro-batches of two sizes, on our engine."""
    return [f"{RUNTIME} model.width={width} minibatch_size={size}" for width in (224, 704) for size in (256, 512, 2048)]


@dataclass(slots=True)
class Timed:
    """What a checkout took for a case, run after run, in seconds; `None` where it has no plan."""

    search_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    predicted_s: float | None = None


def once(server: Server, case: str, into: Timed) -> dict[str, Any]:
    """Runs a case and notes what it took; its result.json, empty without one."""
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        out = Path(folder, "run")
        answer = server.run([*words_for(case, server.tree), f"hydra.run.dir={out}"], Path(folder, "log"), 600.0)
        file = out / "result.json"
        result = json.loads(file.read_text()) if file.exists() else {}
    into.cpu_s.append(answer["cpu_s"])
    if result.get("plan"):
        if server.timing:
            into.search_s.append(result["plan"]["search_s"])
        into.predicted_s = (result["predicted"] or {}).get("iteration_s")
    if result.get("measured"):
        into.step_s.append(result["measured"]["iteration_s"])
    return result


def in_turn(
    trees: tuple[Path, Path], cases: Iterable[str], rounds: int, out: Path | None, *, timing: bool = True
) -> dict[str, list[Timed]]:
    """Runs every case `rounds` times in both checkouts, A B B A A B ..., after one run that fills the caches.

    Args:
        trees: before and after.
        out: a file that gets one line of JSON a case, as the cases end.
        timing: whether seconds of search are those of the processor.

    Returns:
        By case, what the checkouts took.
    """
    found: dict[str, list[Timed]] = {}
    servers = [Server(tree, timing=timing) for tree in trees]
    known: set[str] = set()
    try:
        for case in cases:
            model = case.partition(" cluster=")[0]
            if timing and model not in known:
                known.add(model)
                for server in servers:
                    once(server, case, Timed())
            pair = [Timed(), Timed()]
            for number in range(rounds):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                for i in order:
                    once(servers[i], case, pair[i])
            found[case] = pair
            line = _line(case, pair)
            print(line, flush=True)
            if out is not None:
                with out.open("a") as file:
                    sides = [
                        {"search_s": one.search_s, "cpu_s": one.cpu_s, "step_s": one.step_s, "predicted_s": one.predicted_s}
                        for one in pair
                    ]
                    print(json.dumps({"case": case, "before": sides[0], "after": sides[1]}), file=file)
    finally:
        for server in servers:
            server.close()
    return found


def _label(case: str) -> str:
    """A case without what all have in common."""
    return case.removesuffix(PLAN).removeprefix(RUNTIME).strip()


def _line(case: str, pair: list[Timed]) -> str:
    texts = []
    for name, values in (
        ("search", [t.search_s for t in pair]),
        ("CPU", [t.cpu_s for t in pair]),
        ("step", [t.step_s for t in pair]),
    ):
        if all(values):
            before, after = (median(value) for value in values)
            texts.append(f"{name} {before:.4f} -> {after:.4f} s ({after / before:.3f})")
    before, after = (timed.predicted_s for timed in pair)
    if before and after:
        texts.append(f"predicted x{after / before:.6f}")
    return f"{_label(case):<84} {'; '.join(texts) or 'no plan'}"


def summary(found: dict[str, list[Timed]], *, least_s: float = 0.0) -> list[str]:
    """The median and the largest ratio after/before of what was measured, and of the predicted time of a step.

    Args:
        least_s: shorter ones before are left out of the largest ratio, being noise.
    """
    lines = []
    for what in ("search_s", "cpu_s", "step_s"):
        ratios = []
        for case, (before, after) in found.items():
            old, new = getattr(before, what), getattr(after, what)
            if old and new:
                ratios.append((median(new) / median(old), median(old), case))
        if ratios:
            worst = max((ratio for ratio in ratios if ratio[1] >= least_s), default=max(ratios))
            total = sum(ratio * old for ratio, old, _ in ratios) / sum(old for _, old, _ in ratios)
            lines.append(
                f"{what}: {len(ratios)} cases, median after/before {median(r for r, *_ in ratios):.3f}, "
                f"sum over sum {total:.3f}, largest {worst[0]:.3f} ({worst[1]:.3f} s before): {_label(worst[2])}"
            )
            lines += [
                f"    above 1.1: {ratio:.3f} ({old:.3f} s before): {_label(case)}"
                for ratio, old, case in sorted(ratios)[::-1]
                if ratio > 1.1
            ][:10]
    predicted = [
        (after.predicted_s / before.predicted_s, case)
        for case, (before, after) in found.items()
        if before.predicted_s and after.predicted_s
    ]
    if predicted:
        worst_case = max(predicted)
        lines.append(
            f"predicted iteration_s: {len(predicted)} cases, mean after/before {mean(r for r, _ in predicted):.6f}, "
            f"largest {worst_case[0]:.6f}: {_label(worst_case[1])}"
        )
    lost = [case for case, (before, after) in found.items() if (before.predicted_s is None) != (after.predicted_s is None)]
    return lines + [f"a plan in one checkout only: {_label(case)}" for case in lost]
