"""Files for PipeEdge: a plan as its schedule, and measurements of this machine as its models and types of devices."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from gpp.cluster import Cluster
from gpp.cost.problem import Problem
from gpp.formats.pipeedge.files import MB, schedule_text
from gpp.formats.pipeedge.graph import layer_name
from gpp.graph.forward_only import forward_only
from gpp.graph.op_graph import OpGraph, dtype_bytes
from gpp.plan.plan import Plan


def schedule_of(plan: Plan, graph: OpGraph, cluster: Cluster) -> str | None:
    """The plan as a schedule of PipeEdge's; None where devices are no hosts, or operators no layers of PipeEdge's.

    Layers are counted from 1.
    """
    names = [node for op in graph.ops for node in op.nodes or (op.name,)]
    if not cluster.hosts or names != [layer_name(i + 1) for i in range(len(names))]:
        return None
    sizes = [len(op.nodes or (op.name,)) for op in graph.ops]
    first = np.concatenate([[0], np.cumsum(sizes)])
    stages = [(cluster.hosts[s.devices[0]], int(first[s.ops[0]]) + 1, int(first[s.ops[-1] + 1])) for s in plan.stages]
    # A chain of intervals is all that a schedule can say.
    rest = [1, *(last + 1 for _, _, last in stages)]
    whole = all(begin == expected for (_, begin, _), expected in zip(stages, rest, strict=False))
    return schedule_text(stages) if whole and all(len(s.devices) == 1 for s in plan.stages) else None


def measured_files(problem: Problem, key: str, samples: int) -> dict[str, str]:
    """models.yml and device_types.yml with what is known of the first device: file name -> content.

    An operator is a layer, in the graph's order. Its memory is that of its weights, those that an earlier one reads too left
    out, and what its forward takes on so many samples; what it hands on is all that a later one still reads, so that what goes
    past it counts.

    Args:
        key: the model's name in the files.
        samples: of the micro-batch whose times are written.
    """
    graph, device = forward_only(problem.graph), problem.cluster.devices[0]
    width = dtype_bytes(graph.dtype)
    seen, weights = set[str](), list[float]()
    for op in graph.ops:
        new = [name for name in op.params if name not in seen]
        seen.update(new)
        weights.append(float(sum(graph.param_of[name].num_bytes for name in new)))
    crossing = [
        sum(t.bytes_per_sample for t in graph.tensors if t.producer <= op < max(t.consumers, default=op))
        for op in range(graph.num_ops)
    ]
    # A target is no input of forwards alone.
    given = [own for own in graph.inputs if not own.name.startswith("target:")]
    layers_mb = [(own + samples * op.transient_bytes) / MB for own, op in zip(weights, graph.ops, strict=True)]
    model, kind = json.dumps(key), json.dumps(device.name or problem.cluster.name)
    bw_mbps = problem.cluster.wiring.best.bandwidth_bytes_per_s * 8 / MB
    models = (
        f"{model}:\n  layers: {graph.num_ops}\n  mem_MB: {_list(layers_mb)}\n"
        f"  parameters_in: {round(sum(own.bytes_per_sample for own in given) / width)}\n"
        f"  parameters_out: {_list(round(size / width) for size in crossing)}\n"
    )
    types = (
        f"{kind}:\n  bw_Mbps: {bw_mbps:.10g}\n  mem_MB: {device.memory_bytes / MB:.10g}\n  model_profiles:\n    {model}:\n"
        f"    - batch_size: {samples}\n      dtype: torch.{graph.dtype}\n"
        f"      time_s: {_list(problem.op_times(samples, 0).forward_s.tolist())}\n"
    )
    return {"models.yml": models, "device_types.yml": types}


def _list(values: Iterable[float]) -> str:
    return f"[{', '.join(f'{value:.10g}' for value in values)}]"
