"""The fastest way to serve a small graph on unequal devices, by trying every one: each operator on each device.

Nothing of the planner's is used: no downsets, no types of devices, no tables. A device holds one stage, so a map from operators to
devices is a plan; it counts if its stages form no cycle and fit. Only the plain data of graph and cluster is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import networkx as nx

from gpp.cluster import Cluster
from gpp.graph.op_graph import OpGraph


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is to be served.

    Args:
        seconds: of each operator on each device for one micro-batch: [operators][devices].
        samples: of a micro-batch.
        buffers: messages for which an edge has room.
    """

    graph: OpGraph
    cluster: Cluster
    seconds: list[list[float]]
    samples: int
    buffers: int

    def bottleneck_s(self, device_of: tuple[int, ...]) -> float:
        """Seconds of the slowest stage or message; infinite for what cannot run."""
        graph, devices = self.graph, sorted(set(device_of))
        messages: dict[tuple[int, int], float] = {}
        incoming, outgoing = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
        for tensor in graph.tensors:
            source = device_of[tensor.producer]
            readers = {device_of[reader] for reader in tensor.consumers} - {source}
            for target in readers:
                messages[source, target] = messages.get((source, target), 0.0) + tensor.bytes_per_sample * self.samples
                incoming[target] += tensor.bytes_per_sample * self.samples
            outgoing[source] += tensor.bytes_per_sample * self.samples * bool(readers)
        if not nx.is_directed_acyclic_graph(nx.DiGraph(messages.keys())):
            return math.inf
        worst = 0.0
        for device in devices:
            own = [op for op, its in enumerate(device_of) if its == device]
            params = {name for op in own for name in graph.ops[op].params}
            rows = {name for op in own for name in graph.ops[op].inputs}
            held = sum(param.num_bytes for param in graph.params if param.name in params)
            held += self.samples * sum(given.bytes_per_sample for given in graph.inputs if given.name in rows)
            held += (1 + self.buffers) * (incoming[device] + outgoing[device])
            held += self.samples * max(graph.ops[op].transient_bytes for op in own)
            if held > self.cluster.devices[device].memory_bytes:
                return math.inf
            worst = max(worst, sum(self.seconds[op][device] for op in own))
        for (source, target), size in messages.items():
            link = self.cluster.link(source, target)
            worst = max(worst, link.latency_s + size / link.bandwidth_bytes_per_s)
        return worst

    def best_s(self) -> float:
        """The least bottleneck of all plans; infinite where none fits."""
        numbers = range(self.cluster.num_devices)
        return min(self.bottleneck_s(device_of) for device_of in product(numbers, repeat=self.graph.num_ops))
