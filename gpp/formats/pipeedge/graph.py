"""A model of PipeEdge's files as an operator graph, and the hosts as a cluster."""

from __future__ import annotations

from pathlib import Path

from gpp.cluster import Cluster, Device, Link
from gpp.errors import InvalidFile
from gpp.formats.pipeedge.files import MB, ModelEntry, read_hosts, read_types
from gpp.graph.op_graph import Input, Op, OpGraph, Param, Tensor, dtype_bytes
from gpp.settings import NotNegative, arguments


def layer_name(layer: int) -> str:
    """The operator of a layer, counted from 1."""
    return f"layer_{layer}"


def chain_graph(key: str, entry: ModelEntry, seconds: tuple[float, ...], dtype: str) -> OpGraph:
    """A chain of the model's layers, of which nothing is trained.

    A layer's memory is that of its weights. What the last layer makes goes nowhere and takes memory all the same.

    Args:
        seconds: of each layer for one sample; their proportions are what a coarser graph goes by.
    """
    sizes = [float(count * dtype_bytes(dtype)) for count in entry.moved()]
    names = [layer_name(i + 1) for i in range(entry.layers)]
    ops, params, tensors = list[Op](), list[Param](), list[Tensor]()
    for i, name in enumerate(names):
        params.append(Param(name=f"{name}.weight", num_bytes=round(entry.mem_mb[i] * MB), trainable=False))
        ops.append(
            Op(name=name, kind="layer", forward_flops=seconds[i], params=(f"{name}.weight",), inputs=("input",) if not i else ())
        )
        readers = (i + 1,) if i + 1 < entry.layers else ()
        tensors.append(
            Tensor(name=name, producer=i, consumers=readers, bytes_per_sample=sizes[i + 1], saved=False, differentiable=False)
        )
    given = Input(name="input", bytes_per_sample=sizes[0])
    return OpGraph(name=key, ops=tuple(ops), tensors=tuple(tensors), params=tuple(params), inputs=(given,), dtype=dtype)


@arguments("cluster")
def cluster(*, types: str, devices: str, name: str = "pipeedge", latency_s: NotNegative = 0.0) -> Cluster:
    """The hosts of devices.yml with the memory and the rate that device_types.yml gives their types, on one network.

    A message goes at the rate of the slower end. Speeds are those of the profiles: the devices have none of their own.

    Args:
        types, devices: paths of both files.
        latency_s: of a message; the files have none.

    Raises:
        InvalidFile: a file is none, names an unknown type, or no host; a type that is used has no memory or no rate.
    """
    known = read_types(types, setting="cluster.types")
    hosts = read_hosts(devices, known, types)
    made = dict[str, Device]()
    for kind in hosts:
        entry = known[kind]
        for field, value in (("bw_Mbps", entry.bw_mbps), ("mem_MB", entry.mem_mb)):
            if not value:
                rule = f"must be above 0 for a type that has hosts in {Path(devices).name}"
                raise InvalidFile(types, f"{kind}.{field}", rule, "correct the file", [value], "cluster.types")
        made[kind] = Device(
            kind="cpu",
            name=kind,
            memory_bytes=entry.mem_mb * MB,
            bandwidth_bytes_per_s=entry.bw_mbps * MB / 8,
            peak_flop_per_s={"float32": 1.0},
            memory_bandwidth_bytes_per_s=1.0,
        )
    listed = [(kind, host) for kind, given in hosts.items() for host in given]
    return Cluster(
        name=name,
        devices=tuple(made[kind] for kind, _ in listed),
        nodes=(0,) * len(listed),
        hosts=tuple(host for _, host in listed),
        intra_node=(fastest := Link(latency_s=latency_s, bandwidth_bytes_per_s=max(known[k].bw_mbps for k in hosts) * MB / 8)),
        inter_node=fastest,
    )
