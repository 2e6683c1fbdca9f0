"""A machine by itself: a network namespace with a way out that leads nowhere, which counts what is sent over it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

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
            net = Path(f"/proc/{shown.pid}/net")
            while not self._ended.wait(0.05):
                for table in ("tcp", "tcp6"):
                    self.heard |= {_address(line.split()[1]) for line in _rows(net / table) if line.split()[3] == _LISTEN}
        finally:
            shown.kill()
            shown.wait()


def _rows(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:]


def _address(written: str) -> str:
    """`0100007F:1F90` as 127.0.0.1."""
    words = bytes.fromhex(written.partition(":")[0])
    # Every four bytes are a number of this machine, whose lowest byte comes first.
    turned = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return str(IPv4Address(turned) if len(turned) == 4 else IPv6Address(turned))


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextmanager
def island() -> Iterator[Island]:
    """A namespace with the loopback interface, and another whose packets nobody receives. Needs what `machines.why_not` needs."""
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
