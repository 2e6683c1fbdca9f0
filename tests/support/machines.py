"""Two machines on one: network namespaces with their own addresses, joined by a link that is shaped like a network's."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LINK = "gpp0"


@dataclass(frozen=True)
class Machine:
    """A namespace, and its address on the link."""

    name: str
    address: str

    def start(self, command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a shell's command line there; its process is the command itself."""
        return subprocess.Popen(
            shlex.split(f"ip netns exec {self.name} env {command}"),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def cut(self) -> None:
        """Take the link down."""
        _ip(f"-n {self.name} link set {LINK} down")


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    if not shutil.which("ip"):
        return "iproute2 is not installed"
    name = f"gpp-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    _ip(f"netns delete {name}")
    return None


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextmanager
def two_machines(delay_ms: float = 0.5, rate_mbit: int = 1000) -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces whose only way out is a link of that delay and rate between them."""
    here = f"gpp-{os.getpid()}"
    found = Machine(f"{here}-a", "10.83.0.1"), Machine(f"{here}-b", "10.83.0.2")
    try:
        for machine in found:
            _ip(f"netns add {machine.name}")
            _ip(f"-n {machine.name} link set lo up")
        _ip(f"-n {found[0].name} link add {LINK} type veth peer name {LINK} netns {found[1].name}")
        for machine in found:
            _ip(f"-n {machine.name} address add {machine.address}/24 dev {LINK}")
            _ip(f"-n {machine.name} link set {LINK} up")
            _shape(machine, delay_ms, rate_mbit)
        yield found
    finally:
        for machine in found:
            subprocess.run(["ip", "netns", "delete", machine.name], capture_output=True)


def _shape(machine: Machine, delay_ms: float, rate_mbit: int) -> None:
    """As far as this kernel can: with a delay, else at a rate, else as fast as it goes."""
    on = ["tc", "-n", machine.name, "qdisc", "add", "dev", LINK, "root"]
    netem = f"netem delay {delay_ms}ms rate {rate_mbit}mbit"
    for shape in (netem, f"tbf rate {rate_mbit}mbit burst 256kb latency 50ms"):
        if shutil.which("tc") and not subprocess.run([*on, *shape.split()], capture_output=True).returncode:
            return
