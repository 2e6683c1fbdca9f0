"""`gpp ui FOLDER`: a page to keep open beside the runs of a folder."""

from __future__ import annotations

import argparse
import importlib
import ipaddress
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from gpp.errors import GppError, InvalidConfig
from gpp.ui.runs import found_runs

EXTRA = ("starlette", "uvicorn")
FIX = "run pip install 'gpp[ui]'"
NAMES = {"127.0.0.1": ("127.0.0.1", "localhost"), "::1": ("[::1]", "localhost")}
"""Address of the loopback interface -> the hosts by which a browser may ask for it."""


def main(words: Sequence[str]) -> int:
    """Serve a folder until Ctrl-C; the exit code.

    Args:
        words: of the command line, behind `gpp ui`.
    """
    parser = argparse.ArgumentParser(prog="gpp ui", description="Runs of a folder: a table, comparisons, and live replanning.")
    parser.add_argument("folder", type=Path, help="a run directory, a sweep's, or a folder of them, as outputs")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at, of an interface; default: loopback alone")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE", help="make classes that config.yaml has from it, too"
    )
    asked = parser.parse_args(words)
    try:
        serve(asked.folder, asked.host, asked.port, asked.trust)
    except GppError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def serve(folder: Path, host: str, port: int, trusted: Sequence[str]) -> None:
    """Listen until the process is told to end.

    Raises:
        InvalidConfig: the extra is missing, the folder has no run, or the address cannot be listened at.
    """
    for name in EXTRA:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InvalidConfig("gpp ui", name, "is needed for the page, and is not installed", FIX) from error
    if not folder.is_dir() or not found_runs(folder):
        rule = "has no run" if folder.is_dir() else "is no folder"
        raise InvalidConfig("gpp ui", str(folder), rule, "name a run directory, a sweep's, or a folder of them, as outputs")
    import uvicorn

    from gpp.ui.app import application

    listening = _listen(host, port)
    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    hosts = frozenset(f"{name}:{port}" for name in NAMES.get(host, (shown,)))
    key = secrets.token_urlsafe(24)
    app = application(folder.resolve(), hosts=hosts, key=key, trusted=trusted)
    print(f"gpp ui: http://{shown}:{port}/?key={key}\nWhoever has this address may look and plan; Ctrl-C ends it.", flush=True)
    if host not in NAMES:
        print(f"warning: {host} is open to the network, and what is sent there is not encrypted", file=sys.stderr)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
    server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket at an address.

    Raises:
        InvalidConfig: it is no address of one interface, or is in use.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidConfig("--host", host, "must be an IP address of this machine", "leave it out for 127.0.0.1") from None
    if address.is_unspecified:
        rule = "is every interface, and a page must know by which address it is asked for"
        raise InvalidConfig("--host", host, rule, "name the address of one interface")
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()
    except (OSError, OverflowError) as error:
        found.close()
        raise InvalidConfig(
            "--host, --port", f"{host}:{port}", f"cannot be listened at: {error}", "take another port, or 0"
        ) from error
    return found
