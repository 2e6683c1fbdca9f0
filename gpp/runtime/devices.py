"""The accelerators of this machine, counted before anything starts, and its network interfaces."""

from __future__ import annotations

import fcntl
import socket
import struct

from gpp.cluster import Cluster
from gpp.errors import InvalidConfig, counted

_SIOCGIFADDR = 0x8915


def cuda_devices() -> int:
    """CUDA devices that torch can use here; the driver is asked, and no device is initialised."""
    import torch

    return torch.cuda.device_count()


def check_devices(cluster: Cluster, count: int, engine: str) -> None:
    """Refuse to start workers on devices that this machine does not have.

    Args:
        count: devices of the cluster that workers on this machine take.
        engine: name of the engine that starts them.

    Raises:
        InvalidConfig: there are too few; names the cluster and both counts.
    """
    if cluster.devices[0].kind != "cuda" or not count:  # all workers use the kind of the first device
        return
    found = cuda_devices()
    if found < count:
        here = "no CUDA device" if not found else counted(found, "CUDA device")
        rule = f"engine={engine} needs {counted(count, 'CUDA device')}, and this machine has {here}"
        fix = "use engine=simulate or engine=emulate, which need none, or cluster=local"
        raise InvalidConfig("cluster", cluster.name, rule, fix if not found else f"{fix}, or describe a cluster of {found}")


def check_measurable(cluster: Cluster) -> None:
    """Refuse to measure operators on a device that this machine does not have.

    Raises:
        InvalidConfig: there is no such device here.
    """
    if cluster.devices[0].kind == "cuda" and not cuda_devices():
        rule = f"measures on a device of cluster={cluster.name}, and this machine has no CUDA device"
        raise InvalidConfig("cost", "profiled", rule, "use cost=analytical")


def check_interface(name: str) -> None:
    """Refuse an interface that this machine lacks.

    Raises:
        InvalidConfig: names those that there are.
    """
    known = [known for _, known in socket.if_nameindex()]
    if name not in known:
        rule = f"{socket.gethostname()} has no such network interface; there are {', '.join(known)}"
        raise InvalidConfig("engine.interface", name, rule, "name one of them, or set GLOO_SOCKET_IFNAME on this machine alone")


def address_of(interface: str) -> str:
    """The IPv4 address of an interface.

    Raises:
        InvalidConfig: it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise InvalidConfig(
                "engine.interface", interface, f"has no IPv4 address on {socket.gethostname()}", "name one that has"
            ) from error
    return socket.inet_ntoa(found[20:24])
