"""The part that this process has in a run which a launcher has started everywhere (engine.launch=env)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpp.app.stopping import end_with_launcher
from gpp.errors import GppError, InvalidConfig
from gpp.runtime.controller.place import TORCHRUN, LaunchPlace

if TYPE_CHECKING:
    from gpp.app.experiment import Experiment
    from gpp.runtime.engines.distributed import Distributed

ENV = "env"


def refuse_start(launch: object, *, sweep: bool) -> None:
    """Refuse a start by torchrun that no setting expects, and a sweep under a launcher.

    Args:
        launch: the setting engine.launch; None for an engine that has none.

    Raises:
        InvalidConfig: says how to start instead.
    """
    if launch == ENV and sweep:
        rule = "is one run under one launcher, and a sweep (-m) is many"
        fix = "start one launcher for each job, or leave engine.launch out and sweep with hydra/launcher=submitit_slurm"
        raise InvalidConfig("engine.launch", ENV, rule, fix)
    if launch != ENV and {"RANK", "WORLD_SIZE"} <= set(os.environ):
        rule = "is set by a launcher, and run.py starts the workers itself unless engine.launch=env"
        fix = f"add engine.launch=env ({TORCHRUN}), or run.py without the launcher: python run.py ..."
        raise InvalidConfig("RANK", os.environ["RANK"], rule, fix)


def check_started(experiment: Experiment) -> None:
    """Refuse a cluster of another size than the number of processes that a launcher has started for it.

    Raises:
        InvalidConfig: names both numbers.
    """
    if experiment.runs and getattr(experiment.engine, "launch", None) == ENV:
        from gpp.runtime.controller.leader import Leader

        assert Leader.running is not None, "only rank 0 tells the story"
        Leader.running.check(experiment.cluster.num_devices, "cluster.num_devices")


def run_together(engine: Distributed, words: list[str], tell: Callable[[Path | None], tuple[int, str | None]]) -> int:
    """Do this process's part; returns its exit code, which is rank 0's on every rank.

    Args:
        words: of the command line.
        tell: the whole run, as rank 0 does it; returns the exit code and the reason. It is given the run directory of the
            attempt before this one, if there was one.
    """
    try:
        place = LaunchPlace.of(os.environ, interface=engine.interface, address=engine.master_addr, port=engine.master_port)
        end_with_launcher()
        quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
        # torch prints a stack for a store that is gone; we say it in a line.
        os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR"} if quiet else {}
        from gpp.runtime.controller.attendant import Attendant
        from gpp.runtime.controller.leader import Leader
        from gpp.runtime.transport.network import interface_of

        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]  # the worker is to say what it has to say
        interface_of(engine.interface)  # refuses one that is not here
        settings = {"interface": engine.interface, "words": words, "limit_s": engine.startup_timeout_s}
        if place.rank:
            return Attendant(place, **settings).run()
        with Leader(place, **settings) as leader:
            code, reason = tell(leader.before)
            leader.end(code, reason)
            return code
    except GppError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
