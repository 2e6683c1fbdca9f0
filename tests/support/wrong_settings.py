"""Wrong settings, each with what its refusal must say, and what a sweep must say under an engine that does not fit it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.cli import ROOT, TOWERS

PYTHONS_OWN = re.compile(
    r"Traceback|NoneType|positional argument|keyword argument|object is not|HYDRA_FULL_ERROR|hydra\.cc|not in struct|no viable|"
    r"<class |object at 0x|is not (iterable|callable|subscriptable)|Error executing job"
)
"""Words that no message to a user may hold."""

FILES = {
    "strays/__init__.py": "",
    "strays/name_error.py": "size = undefined_name\n",
    "strays/syntax.py": "def net(:\n",
    "strays/exits.py": "import sys\nsys.exit(0)\n",
    "strays/needs.py": "import a_package_that_nobody_has\n",
    "strays/makers.py": """import sys
from torch import nn

def raises():
    raise RuntimeError("the table is gone")

def exits():
    sys.exit(0)

def nothing():
    return None

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 1)

class Forward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        raise KeyError("a_name_in_forward")

class Leaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        sys.exit(0)

def loss(outputs, targets):
    raise ValueError("no such loss here")

class Endless:
    def __getitem__(self, index):
        return 0, 0

class Broken(Endless):
    def __len__(self):
        raise OSError("the disk is gone")

class One(Endless):
    def __len__(self):
        return 1

class Planner:
    def __init__(self):
        raise LookupError("no plan today")

from gpp.schedules.one_f_one_b import OneFOneB
from gpp.schedules.base import StageSchedule
from gpp.settings import settings

@settings("strategy.schedule")
class HoldsNothing(StageSchedule):
    def order(self, plan, stage, num_microbatches):
        return OneFOneB().order(plan, stage, num_microbatches)
""",
    "mine/strategy/schedule/holds_nothing.yaml": "_target_: strays.makers.HoldsNothing\n",
    "mine/cluster/tab.yaml": "_target_: gpp.cluster.local\nname: tab\n\tnum_devices: 2\n",
    "mine/cluster/typo.yaml": "_target_: gpp.cluster.local\nname: typo\nnum_devcies: 2\n",
    "mine/cluster/twice.yaml": "_target_: gpp.cluster.local\nname: twice\nname: again\nnum_devices: 2\n",
    "mine/cluster/colon.yaml": "_target_: gpp.cluster.local\nname: a: b\nnum_devices: 2\n",
    "mine/cluster/listed.yaml": "- _target_: gpp.cluster.local\n- num_devices: 2\n",
    "mine/cluster/parent.yaml": "defaults: [locla]\nname: parent\n",
    "mine/cluster/circle.yaml": "_target_: gpp.cluster.local\nname: circle\nnum_devices: ${cluster.num_devices}\n",
    "mine/cluster/text.yaml": "_target_: gpp.cluster.local\nname: text\nnum_devices: two\n",
    "mine/cluster/lacks.yaml": "_target_: gpp.cluster.local\nname: lacks\n",
    "mine/cluster/digits.yaml": f"_target_: gpp.cluster.local\nname: digits\nnum_devices: {'7' * 5000}\n",
    "mine/cluster/latin.yaml": b"_target_: gpp.cluster.local\nname: caf\xe9\nnum_devices: 2\n",
    "mine/cluster/stray.yaml": "_target_: strays.name_error.cluster\n",
    "mine/strategy/own.yaml": "defaults: [base, {planner: even}]\nname: own\n",
    "mine/strategy/stray.yaml": "defaults: [even]\nname: stray\nplanner:\n  _target_: strays.makers.Planner\n",
    "mine/experiment/fast.yaml": "# @package _global_\nsteps: 3\n",
}
"""Code and options of a user's own that are wrong; the folder `mine` is given with -cd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A command line that must be refused.

    Args:
        words: as in a shell; `TOWERS` stands for a model of the tests' own, `MINE` for `-cd` with the folder above.
        shown: the message shows it as field and value.
        fix: words of the fix.
        code: exit code.
        kind: it is the first of its kind.
    """

    words: str
    shown: str
    fix: str
    code: int = 2
    kind: bool = False

    def listed(self, folder: Path) -> list[str]:
        out: list[str] = []
        for word in shlex.split(self.words):
            out += TOWERS if word == "TOWERS" else ["-cd", str(folder / "mine")] if word == "MINE" else [word]
        return [*out, *([] if any(word.startswith("logger") for word in out) else ["logger=none"])]


def complaints(case: Wrong, code: int, out: str) -> list[str]:
    """What is wrong with the answer to a wrong command line; empty if nothing is."""
    text = " ".join(out.split())
    message, _, fix = text.partition("Fix: ")
    found = [] if code == case.code else [f"exit code {code}, not {case.code}"]
    found += [] if case.shown in text else [f"does not say {case.shown!r}"]
    found += [] if (case.fix in fix) or (case.code == 3 and case.fix in text) else [f"its fix does not say {case.fix!r}"]
    found += [] if re.search(re.escape(case.shown) + r"[^:]*: \S", message) or case.code == 3 else ["gives no rule"]
    found += [f"says {match.group()!r}"] if (match := PYTHONS_OWN.search(text)) else []
    return found


def write(folder: Path) -> None:
    """Write the user's files."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _table(text: str) -> list[Wrong]:
    """Cases from lines `words | field=value | words of the fix`; `*` and `3:` in front are `kind` and the exit code 3."""
    cases = []
    for line in text.strip().splitlines():
        if line and not line.startswith("#"):
            words, shown, fix = (part.strip() for part in line.split(" | "))
            kind, words = words.startswith("* "), words.removeprefix("* ")
            code, words = (3, words.removeprefix("3: ")) if words.startswith("3: ") else (2, words)
            cases.append(Wrong(words=words, shown=shown, fix=fix, code=code, kind=kind))
    return cases


CASES = [
    Wrong(words="seed=" + "7" * 5000, shown="seed=7777", fix="a number that fits"),
    Wrong(words="seed=-" + "7" * 5000, shown="seed=-7777", fix="a number that fits"),
    Wrong(words="seed=1" + "_000" * 1500, shown="seed=1_000", fix="a number that fits"),
    *_table((Path(__file__).parent / "wrong_settings.txt").read_text()),
]


SWEEPS = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
ENGINES = sorted(path.stem for path in (ROOT / "conf" / "engine").glob("*.yaml") if path.stem != "base")


def first_job(sweep: str, engine: str) -> list[str]:
    """The words of a sweep's first job, with another engine."""
    written = yaml.safe_load((ROOT / "sweeps" / f"{sweep}.yaml").read_text())
    while "model" not in (params := written["hydra"]["sweeper"]["params"]) and written["defaults"][0] != "config":
        parent = yaml.safe_load((ROOT / "sweeps" / f"{written['defaults'][0]}.yaml").read_text())
        parent["hydra"]["sweeper"]["params"] |= params
        written = parent
    values = {key: str(value).removeprefix("range(").split(",")[0] for key, value in params.items()}
    words = [f"{key}={'null' if value == 'None' else value}" for key, value in values.items() if key != "engine"]
    return ["-cd", "sweeps", "-cn", sweep, "hydra.mode=RUN", *words, f"engine={engine}"]


def misfit(engine: str, code: int, out: str) -> list[str]:
    """What is wrong with the answer to a sweep's first job under an engine; empty if it runs or is refused clearly."""
    text = " ".join(out.split())
    found = [] if code in (0, 2) else [f"exit code {code}"]
    found += ["simulate runs everything"] if code and engine == "simulate" else []
    found += [] if not code or re.search(r"[\w.]+=.+: .+\. Fix: ", text) else ["gives no field, value, rule and fix"]
    return found + ([f"says {match.group()!r}"] if (match := PYTHONS_OWN.search(text)) else [])
