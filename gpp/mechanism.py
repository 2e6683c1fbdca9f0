"""Where the core finds what a stage may do beyond plain passes, without naming any of it.

A mechanism is a package: a folder of `gpp/mechanisms/`, or one of a user's own that `use` names. It has a file for each room of the
core that it adds something to, and each such file has one name that the room asks for:

    stage.py       Value      what a stage carries (`gpp.stage.AbstractStageValue`)
    bill.py        BILL       seconds and bytes of a stage and of its messages (`gpp.cost.stage.AbstractBill`)
    kinds.py       KINDS      rows for the table of kinds (`gpp.program.kind.Kind`)
    lowering.py    LOWERING   a pass over the program, its messages, and their proof (`gpp.program.added.AbstractLowering`)
    schedules/     OFFERED    those of its orders that the page of a run offers, by name
    planning.py    PLANNING   plans and predictions of pipelines that train nothing (`gpp.simulate.added.AbstractPlanning`)
    prediction.py  PREDICTION the steady state of plans that no simulation is made for (`gpp.simulate.added.AbstractPrediction`)
    sharing.py     SHARING    what replicas do with micro-batches, under `strategy.replicas` (`gpp.plan.choice.AbstractSharing`)
    searching.py   SEARCH     plans with the mechanism, in the search of a planner (`gpp.planners.base.AbstractSearch`)
    variants.py    VARIANTS   other ways to run the operators of a captured model (`gpp.capture.added.AbstractVariants`)
    passes.py      PASSES     the type in which forwards compute (`gpp.capture.copies.AbstractPasses`)
    capture.py     CAPTURE    what a backward can leave for later, in a captured model (`gpp.capture.added.AbstractCapturePart`)
    asked.py       ASKED      what settings ask of it for all stages alike (`gpp.runtime.job_asked.AbstractAsked`)
    job.py         JOB        what is refused before a worker starts, who updates what (`gpp.runtime.job.AbstractJobPart`)
    mode.py        MODE       a mode of runs that train nothing (`gpp.runtime.mode.AbstractMode`)
    exporter.py    EXPORTER   an engine that runs plans of its mode (`gpp.export.base.AbstractExporter`)
    export.py      EXPORT     what engines of others are told of it (`gpp.export.base.AbstractExportPart`)
    course.py      COURSE     what they do, for planners and workers alike (`gpp.runtime.job_asked.AbstractJobCourse`)
    run.py         RUN        their workers, and the results of these (`gpp.runtime.mode.AbstractCourseRun`)
    worker.py      WORKER     stages on shards, weights of several versions, hooks around passes and messages
                              (`gpp.runtime.worker.hooks.AbstractWorkerPart`)

The files of a mechanism import the rooms that they add to. A room never imports them: it calls `found`, which reads a file when
its room first asks for it. So planning never reads the files for workers, and a mechanism that is not there costs nothing.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Final, TypeVar

from gpp.errors import InvalidConfig

SHIPPED: Final = "gpp.mechanisms"

T = TypeVar("T")

_packages: list[str] = []
_found: dict[tuple[str, str], dict[str, object]] = {}
_watching: list[Callable[[], None]] = []


def packages() -> tuple[str, ...]:
    """The packages of all mechanisms: those that ship, by name, then those that `use` has named.

    >>> all(name.startswith("gpp.mechanisms.") for name in packages())
    True
    """
    if not _packages:
        folder = import_module(SHIPPED).__path__
        _packages.extend(f"{SHIPPED}.{module.name}" for module in pkgutil.iter_modules(folder) if module.ispkg)
    return tuple(_packages)


def own() -> tuple[str, ...]:
    """The packages that do not ship: a worker has to be told of them."""
    return tuple(name for name in packages() if not name.startswith(f"{SHIPPED}."))


def use(names: Iterable[str], *, field: str = "strategy.mechanisms") -> None:
    """Add the packages of a user's own mechanisms; those that are known already are left as they are.

    Args:
        field: the setting that names them.

    Raises:
        InvalidConfig: there is no such package, or another mechanism has its name.
    """
    new = [name for name in dict.fromkeys(names) if name not in packages()]
    for name in new:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.submodule_search_locations is None:
            rule = "must be a package with the files of a mechanism (gpp/mechanism.py lists them)"
            raise InvalidConfig(field, name, rule, "put its folder on PYTHONPATH, or correct the name")
        if other := next((one for one in packages() if one.rpartition(".")[2] == name.rpartition(".")[2]), None):
            rule = f"has the last name of {other}, and plans call both by that"
            raise InvalidConfig(field, name, rule, "rename the package")
        _packages.append(name)
    if new:
        _found.clear()
        for told in _watching:
            told()


def watch(told: Callable[[], None]) -> None:
    """Have a table that is made of the files of mechanisms told whenever there are more of them."""
    _watching.append(told)


def found(file: str, name: str, kind: type[T]) -> dict[str, T]:
    """What the mechanisms add to a room: the last part of a package's name -> `name` of its `file`.

    Args:
        kind: what each must be an instance of.

    Raises:
        InvalidConfig: a file lacks the name, or it is something else.
    """
    known = _found.get((file, name))
    if known is None:
        known = {}
        for package in packages():
            if find_spec(f"{package}.{file}") is None:
                continue
            part = getattr(import_module(f"{package}.{file}"), name, None)
            if not isinstance(part, kind):
                rule = f"must have {name}, an instance of {kind.__name__}, in its file {file}.py"
                raise InvalidConfig("strategy.mechanisms", package, rule, "add it, or rename the file")
            known[package.rpartition(".")[2]] = part
        _found[file, name] = known
    return known  # type: ignore[return-value]  # what is there has been found to be of the kind


def parts(names: Collection[str], file: str, name: str, kind: type[T]) -> list[T]:
    """The parts that the mechanisms of these names add to a room, as `found` has them; no file is read where there are no names."""
    return [part for own_name, part in found(file, name, kind).items() if own_name in names] if names else []
