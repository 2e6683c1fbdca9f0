"""The network interfaces of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

from gpp.errors import InvalidConfig

_SIOCGIFADDR = 0x8915


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
