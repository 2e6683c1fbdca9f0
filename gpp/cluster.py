"""Devices, links, clusters. SI units throughout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Annotated, Literal, TypedDict

from pydantic import Field

from gpp.errors import InvalidConfig
from gpp.links import Link as Link
from gpp.links import PairLink as PairLink
from gpp.links import Wiring
from gpp.settings import Count, Natural, NotNegative, Positive, arguments, settings

Devices = Annotated[int, Field(ge=1, le=100_000)]
"""The number of devices, or nodes; it is limited because each is an object of its own."""


@settings("cluster.device")
class Device:
    """One accelerator, or one core of this machine.

    Args:
        kind: `cpu` or `cuda`, torch's name of it.
        memory_bytes: memory that a stage may use.
        peak_flop_per_s: dtype name -> dense matrix throughput (datasheet).
        efficiency: the share of the peak that large matrix products reach.
        memory_bandwidth_bytes_per_s: bandwidth of the device's own memory.
        kernel_latency_s: fixed cost of one kernel, which makes small micro-batches inefficient.
        speed_factor: 1 for the device as described, 0.5 for one that takes twice as long.
        host_bandwidth_bytes_per_s: of the link to the host's memory, in either direction; None: nothing can be kept on the host.
        host_latency_s: fixed cost of one copy over it.
        host_memory_bytes: memory of the host that this device may use; None: as much as is asked for.
        host_sharers: devices behind one such link, this one included; each is given an equal part.
        name: of its type, by which tables of links and of times find it; None: it has none.
        bandwidth_bytes_per_s: of the device's own link to the others. A message goes at the slowest of both devices' rates and
            that of the link between their nodes; None: the latter alone decides.
    """

    kind: Literal["cpu", "cuda"]
    memory_bytes: Positive
    peak_flop_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    memory_bandwidth_bytes_per_s: Positive
    efficiency: Positive = 1.0
    kernel_latency_s: NotNegative = 0.0
    speed_factor: Positive = 1.0
    host_bandwidth_bytes_per_s: Positive | None = None
    host_latency_s: NotNegative = 0.0
    host_memory_bytes: Positive | None = None
    host_sharers: Count = 1
    name: str | None = None
    bandwidth_bytes_per_s: Positive | None = None

    def flop_per_s(self, dtype: str) -> float:
        """Sustained FLOP/s for `dtype`; a dtype that the table lacks runs at the slowest listed rate."""
        peak = self.peak_flop_per_s.get(dtype, min(self.peak_flop_per_s.values()))
        return peak * self.efficiency * self.speed_factor

    def host_copy_s(self, num_bytes: float) -> float:
        """Seconds of a copy to the host's memory, or back, while all that share the link copy too.

        Raises:
            InvalidConfig: the device has no link to the host.
        """
        if self.host_bandwidth_bytes_per_s is None:
            raise InvalidConfig(
                "cluster.device.host_bandwidth_bytes_per_s",
                None,
                "the plan keeps activations on the host, and this device has no link to it",
                "give its bandwidth, or plan without offload (strategy/memory=keep or recompute)",
            )
        return self.host_latency_s + num_bytes * self.host_sharers / self.host_bandwidth_bytes_per_s


@settings("cluster", slots=False)
class Cluster:
    """Devices, the node each sits in, and the links between them.

    What link two devices have, and what links a group has, is asked of `link` and `wiring` alone.

    Args:
        intra_node: the link between two devices of one node; inter_node: of two nodes.
        network_cards: of every node; each carries what `inter_node` says. A message between two devices goes over one of them, an
            all-reduce over as many as its devices' part of the node (`Wiring.cards`).
        collective_efficiency: the share of a link's bandwidth that an all-reduce reaches.
        collective_latency_s: fixed cost of each step of an all-reduce's ring; None for the links' own latency.
        processors: cores that all devices share, where they are fewer than the devices; None: each has its own.
        links: pairs of devices, or of types of devices, that have links of their own.
        hosts: the name of each device's machine, for what is written for others; empty where they have none.
    """

    name: str
    devices: tuple[Device, ...]
    nodes: tuple[Natural, ...]
    intra_node: Link
    inter_node: Link
    network_cards: Count = 1
    collective_efficiency: Positive = 1.0
    collective_latency_s: NotNegative | None = None
    processors: Count | None = None
    links: tuple[PairLink, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.nodes):
            raise InvalidConfig(
                "cluster.nodes",
                self.nodes,
                "one node index for each device, and one device at least",
                f"give {len(self.devices)} indices",
            )
        if len(self.hosts) not in (0, len(self.devices)):
            raise InvalidConfig("cluster.hosts", self.hosts, "one name for each device, or none", f"give {len(self.devices)} names")
        self.wiring.check()

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def crowded(self, num_devices: int) -> bool:
        """Whether so many busy devices have fewer processors than they are."""
        return self.processors is not None and self.processors < num_devices

    def link(self, a: int, b: int) -> Link:
        """The link between two different devices, the same in both directions."""
        return self.wiring.link(a, b)

    @cached_property
    def wiring(self) -> Wiring:
        """The links of all devices."""
        return Wiring(
            nodes=self.nodes,
            names=tuple(device.name for device in self.devices),
            rates=tuple(device.bandwidth_bytes_per_s for device in self.devices),
            intra_node=self.intra_node,
            inter_node=self.inter_node,
            network_cards=self.network_cards,
            pairs=self.links,
        )

    def with_copies(self, of: Sequence[int], nodes: Sequence[int]) -> Cluster:
        """The cluster and behind its devices a copy of each of some devices, in the given nodes.

        A link of a pair of devices is that of their copies, too, where these are in one node, or in two, as the pair is.
        """
        where = (*self.nodes, *nodes)
        images: dict[int, list[int]] = {}
        for device, original in enumerate((*range(self.num_devices), *of)):
            images.setdefault(original, []).append(device)
        links: list[PairLink] = []
        for pair in self.links:
            ends = [pair.between]
            if pair.numbers is not None:
                a, b = pair.numbers
                together = where[a] == where[b]
                ends = [(x, y) for x, y in product(images[a], images[b]) if (where[x] == where[y]) == together]
            links += [replace(pair, between=each) for each in ends]
        devices = (*self.devices, *(self.devices[d] for d in of))
        return replace(self, devices=devices, nodes=where, links=tuple(links), hosts=())

    def only(self, kept: Sequence[int]) -> Cluster:
        """The cluster of some of its devices; links of pairs, or of types, that it then lacks are left out."""
        number = {device: i for i, device in enumerate(kept)}
        links: list[PairLink] = []
        for pair in self.links:
            if pair.numbers is None:
                links += [pair] * ({*pair.between} <= {self.devices[d].name for d in kept})
            elif {*pair.numbers} <= number.keys():
                links.append(replace(pair, between=tuple(number[d] for d in pair.numbers)))
        return replace(
            self,
            devices=tuple(self.devices[d] for d in kept),
            nodes=tuple(self.nodes[d] for d in kept),
            links=tuple(links),
            hosts=tuple(self.hosts[d] for d in kept) if self.hosts else (),
        )

    def evened(self) -> Cluster:
        """The cluster with the mean links inside and between nodes in place of those of single devices and pairs."""
        if self.wiring.by_node is not None:
            return self
        inside, across = self.wiring.means
        devices = tuple(replace(device, bandwidth_bytes_per_s=None) for device in self.devices)
        return replace(self, devices=devices, intra_node=inside, inter_node=across, links=())

    def allreduce_s(self, num_bytes: float, devices: tuple[int, ...]) -> float:
        """Ring all-reduce: 2(n-1) steps of bytes/n each over the slowest link of the ring.

        Over nodes there are as many rings as the devices have network cards; each carries an equal part of the bytes, and leaves
        a node over a card of its own. Inside a node all of them share the links.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; NCCL's channels for the rings.
        """
        lines = self.allreduce_lines(devices) if num_bytes > 0 else ()
        return max((fixed + each * num_bytes for fixed, each in lines), default=0.0)

    def allreduce_lines(self, devices: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Fixed seconds of `allreduce_s`, and those for each byte, over each kind of link in the ring; the largest sum counts."""
        n = len(devices)
        if n < 2:
            return ()
        steps, share = 2 * (n - 1), 2 * (n - 1) / n / self.collective_efficiency
        fixed_s = self.collective_latency_s
        return tuple(
            (steps * (link.latency_s if fixed_s is None else fixed_s), share / cards / link.bandwidth_bytes_per_s)
            for link, cards in self.wiring.ring(devices)
        )

    @cached_property
    def homogeneous(self) -> bool:
        """Whether devices are equal, and so are their links, but for the nodes that they are in."""
        return self.wiring.by_node is not None and self.devices.count(self.devices[0]) == len(self.devices)


@arguments("cluster")
def uniform(
    *,
    name: str,
    num_nodes: Devices,
    devices_per_node: Devices,
    device: Device,
    intra_node: Link,
    inter_node: Link | None = None,
    memory_bytes: Positive | None = None,
    network_cards: Count = 1,
    collective_efficiency: Positive = 1.0,
    links: tuple[PairLink, ...] = (),
) -> Cluster:
    """A cluster of equal devices: `num_nodes` nodes with `devices_per_node` each.

    `memory_bytes` replaces the device's memory (to ask what a smaller card would do).
    """
    return mixed(
        name=name,
        nodes=[ClusterNode(device=device, count=devices_per_node)] * num_nodes,
        intra_node=intra_node,
        inter_node=inter_node,
        memory_bytes=memory_bytes,
        network_cards=network_cards,
        collective_efficiency=collective_efficiency,
        links=links,
    )


class ClusterNode(TypedDict):
    """A node of equal devices."""

    device: Device
    count: Devices


@arguments("cluster")
def mixed(
    *,
    name: str,
    nodes: Annotated[Sequence[ClusterNode], Field(min_length=1)],
    intra_node: Link,
    inter_node: Link | None = None,
    memory_bytes: Positive | None = None,
    network_cards: Count = 1,
    collective_efficiency: Positive = 1.0,
    links: tuple[PairLink, ...] = (),
) -> Cluster:
    """A cluster of nodes that differ: `nodes=[{"device": ..., "count": 4}, ...]`, equal devices inside a node.

    `memory_bytes` replaces every device's memory.

    Example: two fast devices and four slow ones are
    `mixed(name="m", nodes=[{"device": fast, "count": 2}, {"device": slow, "count": 4}], intra_node=link)`.
    """
    devices: list[Device] = []
    place: list[int] = []
    for i, node in enumerate(nodes):
        device, count = node["device"], node["count"]
        devices += [device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)] * count
        place += [i] * count
    return Cluster(
        name=name,
        devices=tuple(devices),
        nodes=tuple(place),
        intra_node=intra_node,
        inter_node=inter_node or intra_node,
        network_cards=network_cards,
        collective_efficiency=collective_efficiency,
        links=links,
    )


@arguments("cluster")
def flat(
    *,
    num_devices: Devices,
    bandwidth_bytes_per_s: Positive,
    memory_bytes: Positive,
    name: str = "flat",
    latency_s: NotNegative = 0.0,
) -> Cluster:
    """Equal devices with one link between any two of them, as planners without a topology assume.

    The devices are nominal (1 FLOP/s, 1 B/s of memory); times come from a profile.
    """
    return uniform(
        name=name,
        num_nodes=1,
        devices_per_node=num_devices,
        device=Device(kind="cuda", memory_bytes=memory_bytes, peak_flop_per_s={"float32": 1.0}, memory_bandwidth_bytes_per_s=1.0),
        intra_node=Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s),
    )


@arguments("cluster")
def local(
    *,
    num_devices: Devices,
    name: str = "local",
    device: Device | None = None,
    link: Link | None = None,
    memory_bytes: Positive | None = None,
    speeds: tuple[Positive, ...] | None = None,
) -> Cluster:
    """This machine as `num_devices` devices of one core each.

    The machine's memory is dealt out evenly; `memory_bytes` replaces that.

    Args:
        device: None for `core()`.
        link: None for `LOOPBACK`.
        speeds: factor on the speed of each device, for plans on unequal ones; `engine.paced` has workers take that long.
    """
    device = device or core()
    if memory_bytes is None:
        memory_bytes = min(device.memory_bytes, machine_memory_bytes() / num_devices)
    if speeds is not None and len(speeds) != num_devices:
        raise InvalidConfig("cluster.speeds", speeds, f"one speed for each of {num_devices} devices", f"give {num_devices} numbers")
    found = uniform(
        name=name,
        num_nodes=1,
        devices_per_node=num_devices,
        device=device,
        intra_node=link or LOOPBACK,
        memory_bytes=memory_bytes,
        collective_efficiency=GLOO_COLLECTIVE_EFFICIENCY,
    )
    if speeds is None:
        return found
    return replace(found, devices=tuple(replace(device, speed_factor=speed) for speed in speeds))


LOOPBACK = Link(latency_s=1e-4, bandwidth_bytes_per_s=2.3e9)
"""gloo between two processes of one machine: 80 to 130 us for 4 to 64 KB, 2.2 to 2.7 GB/s for 1 to 8 MB, on 2 cores."""

GLOO_COLLECTIVE_EFFICIENCY = 0.4
"""The share of that bandwidth in an all-reduce of 1 to 4 MB between two processes: 0.9 to 1.1 GB/s, on 2 cores."""


def core() -> Device:
    """One core of this machine, as in a data sheet; `cost=profiled` measures instead.

    The numbers are typical of a server core with AVX-512 or AVX2 at about 3 GHz (3 GHz x 32 FLOP per cycle): float32
    products of 512 to 2048 rows measure 90 to 150 GFLOP/s through PyTorch. bfloat16 counts as float32: it is three
    times faster with AMX, and slower without AVX-512 BF16. 10 GB/s is a typical copy rate of one core, and 5 us is
    PyTorch's time to dispatch one small CPU operator with autograd. A core's host is the same machine: one thread copies
    4 to 16 MB at 13 GB/s and 64 MB at 6, and takes 90 us to be asked. Messages do not go that way.
    """
    return Device(
        kind="cpu",
        memory_bytes=machine_memory_bytes(),
        memory_bandwidth_bytes_per_s=1e10,
        kernel_latency_s=5e-6,
        host_bandwidth_bytes_per_s=6e9,
        host_latency_s=1e-4,
        peak_flop_per_s={"float32": 1e11, "float64": 0.5e11, "bfloat16": 1e11},
    )


def machine_memory_bytes() -> float:
    """Physical memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
