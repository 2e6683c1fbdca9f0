"""The place of a process among those that a launcher has started with one command on every machine.

torchrun's variables count first, then Slurm's. What a launcher has not set is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gpp.errors import InvalidConfig
from gpp.runtime.devices import address_of

TORCHRUN = "torchrun --nproc-per-node 4 run.py ... engine.launch=env"
SRUN = "srun --ntasks 4 python run.py ... engine.launch=env"

EXAMPLES = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "node[01-02]",
}
"""Variables of the launchers, each with a value that it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlace:
    """One process of a launch.

    Args:
        rank, world: its number, and how many processes there are.
        local_rank: its number on its own machine.
        machines: how many there are; None where the launcher does not say.
        address, port: where the processes meet, on rank 0's machine.
        agent: whether the launcher itself keeps a store there, as torchrun does; else rank 0 opens one.
    """

    rank: int
    world: int
    local_rank: int
    machines: int | None
    address: str
    port: int
    agent: bool

    @classmethod
    def of(cls, env: Mapping[str, str], *, interface: str, address: str | None, port: int) -> Self:
        """The place that a process's environment tells.

        Args:
            interface: the network interface that the run may use.
            address, port: where the processes meet, if the environment does not say.

        Raises:
            InvalidConfig: a variable is missing or wrong, or the interface does not join the machines.
        """
        agent = False
        if "RANK" in env:
            names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
            machines = _number(env, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else None
            address = env.get("MASTER_ADDR") or address or _text(env, "MASTER_ADDR")
            agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        elif "SLURM_PROCID" in env:
            names = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
            nodes = hosts(_text(env, "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"))
            machines, own = len(nodes), address_of(interface.split(",")[0]) if len(nodes) == 1 else nodes[0]
            address = env.get("MASTER_ADDR") or address or own
        else:
            rule = "needs the variables of a launcher, and neither RANK (torchrun) nor SLURM_PROCID (srun) is set"
            raise InvalidConfig("engine.launch", "env", rule, f"start every process by one, as in {TORCHRUN} or {SRUN}")
        rank, world, local_rank = (_number(env, name) for name in names)
        port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else port
        if rank >= world:
            raise InvalidConfig(names[0], rank, f"must be less than {names[1]}={world}", "correct the launcher's variables")
        if (machines or 1) > 1 and interface == "lo":
            rule = f"the loopback interface does not join {machines} machines"
            raise InvalidConfig("engine.interface", "lo", rule, "name the one that does, as in engine.interface=eth0")
        return cls(rank=rank, world=world, local_rank=local_rank, machines=machines, address=address, port=port, agent=agent)


def world_of(env: Mapping[str, str]) -> int | None:
    """The number of processes that a launcher has started; None where there is none, or it does not say."""
    text = env.get("WORLD_SIZE" if "RANK" in env else "SLURM_NTASKS", "")
    return int(text) if text.isdecimal() and int(text) else None


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        rule = "engine.launch=env needs this variable, and the launcher has not set it"
        raise InvalidConfig(name, None, rule, f"set it, as in {name}={EXAMPLES[name]}, or use torchrun or srun, which set it")
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name) if name in EXAMPLES else env[name]
    if not text.isdecimal():
        raise InvalidConfig(name, text, "must be an integer of at least 0", f"set it as in {name}={EXAMPLES.get(name, '2')}")
    return int(text)


def hosts(nodelist: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list, in its order: `a[01-02,7]-x,b` are a01-x, a02-x, a7-x and b.

    Raises:
        InvalidConfig: it is no such list.
    """
    out: list[str] = []
    one = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{one}(,{one})*", nodelist):
        raise _no_list(nodelist)
    for word in re.findall(one, nodelist):
        names = [""]
        for part in re.split(r"(\[[^\]]*\])", word):
            ends = _range(part[1:-1], nodelist) if part.startswith("[") else [part]
            names = [name + end for name in names for end in ends]
        out += names
    return tuple(out)


def _range(text: str, nodelist: str) -> list[str]:
    out = []
    for item in text.split(","):
        low, _, high = item.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()):
            raise _no_list(nodelist)
        out += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return out


def _no_list(nodelist: str) -> InvalidConfig:
    return InvalidConfig("SLURM_JOB_NODELIST", nodelist, "is no list of hosts", "write it as in node[01-02],other")
