"""Machines on one: network namespaces with their own addresses.

Two are joined by a link that is shaped like a network's; an island has a way out that leads nowhere, which counts what is sent.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Literal

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


OUT = "gpp-out"
ADDRESS = "10.84.0.1"

_LISTEN = "0A"  # <net/tcp_states.h>


@dataclass
class Island:
    """The namespace, and the addresses at which something in it has listened so far."""

    name: str
    heard: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end, and watch for sockets meanwhile."""
        process = self.start(words, **options)
        out, _ = process.communicate(timeout=240)
        return subprocess.CompletedProcess(words, process.returncode, out, None)

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        command = ["ip", "netns", "exec", self.name, *words]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

    def sent(self) -> int:
        """Packets that were sent to other machines, or would have been."""
        path = f"/sys/class/net/{OUT}/statistics/tx_packets"
        return int(subprocess.run(["ip", "netns", "exec", self.name, "cat", path], check=True, capture_output=True).stdout)

    def watch(self) -> None:
        """Note who listens, until the island is left."""
        shown = subprocess.Popen(["ip", "netns", "exec", self.name, "sleep", "600"])
        try:
            while not self._ended.wait(0.05):
                self.heard |= {address for address, _ in listening(shown.pid)}
        finally:
            shown.kill()
            shown.wait()


def listening(process: int | Literal["self"] = "self") -> set[tuple[str, int]]:
    """The addresses and ports at which something listens on the machine of a process."""
    tables = (Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {(_address(row[1]), int(row[1].partition(":")[2], 16)) for row in rows if row[3] == _LISTEN}


def _address(written: str) -> str:
    """`0100007F:1F90` as 127.0.0.1."""
    words = bytes.fromhex(written.partition(":")[0])
    # Every four bytes are a number of this machine, whose lowest byte comes first.
    turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(IPv4Address(turned) if len(turned) == 4 else IPv6Address(turned))


@contextmanager
def island() -> Iterator[Island]:
    """A namespace with the loopback interface, and another whose packets nobody receives. Needs what `why_not` needs."""
    here = Island(f"gpp-{os.getpid()}-i")
    try:
        _ip(f"netns add {here.name}")
        _ip(f"netns exec {here.name} sysctl -q -w net.ipv6.conf.default.disable_ipv6=1")
        _ip(f"-n {here.name} link set lo up")
        _ip(f"-n {here.name} link add {OUT} type veth peer name {OUT}-end")
        _ip(f"-n {here.name} address add {ADDRESS}/24 dev {OUT}")
        _ip(f"-n {here.name} link set {OUT}-end up")
        _ip(f"-n {here.name} link set {OUT} up")
        _ip(f"-n {here.name} route add default dev {OUT}")
        watcher = threading.Thread(target=here.watch, daemon=True)
        watcher.start()
        time.sleep(0.1)
        yield here
        here._ended.set()
        watcher.join()
    finally:
        here._ended.set()
        subprocess.run(["ip", "netns", "delete", here.name], capture_output=True)
