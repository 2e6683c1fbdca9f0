"""Which operators a fresh process has when it imports modules, as a worker will: `python -m gpp.capture.registering MODULE ...`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

import torch

from gpp.child import same_modules


@dataclass(frozen=True, slots=True)
class Tried:
    """What the import of some modules has registered.

    Args:
        modules: operator (`namespace::name`, with `.overload` unless that is the default) -> the module.
        failed: module -> what its import has raised.
    """

    modules: dict[str, str]
    failed: dict[str, str]


def registered() -> set[str]:
    """All operators of this process."""
    return set(torch._C._dispatch_get_all_op_names())


@cache
def tried(modules: tuple[str, ...]) -> Tried:
    """Import modules, in order, in a fresh process with a worker's path; it takes the seconds that torch takes to load."""
    command = [sys.executable, "-m", __name__, *modules]
    environment = {**os.environ, **same_modules()}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Tried({}, {" and ".join(modules): said})
    return Tried(**json.loads(lines[-1]))


def _main(modules: list[str]) -> None:
    found = Tried({}, {})
    for module in modules:
        before = registered()
        try:
            importlib.import_module(module)
        except Exception as error:
            found.failed[module] = f"{type(error).__name__}: {error}"
        found.modules.update(dict.fromkeys(registered() - before, module))
    print(f"\n{json.dumps({'modules': found.modules, 'failed': found.failed})}")


if __name__ == "__main__":
    _main(sys.argv[1:])
