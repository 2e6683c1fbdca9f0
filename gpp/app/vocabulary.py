"""The words of the command line (groups, options, settings), and the nearest of them to a word that is none.

It reads folders of YAML files and knows no Hydra.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp.errors import LONGEST

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE if (PACKAGE / "conf").is_dir() else PACKAGE.parent
"""Where conf/ and run.py lie: the repository, or in a wheel the package itself."""
CONF = ROOT / "conf"
BASE = "base"
GROUPS = {
    "model": "Models",
    "strategy": "Strategies",
    "strategy/planner": "Planners",
    "strategy/schedule": "Schedules",
    "strategy/weights": "Weight policies",
    "strategy/weights/correction": "Corrections of late gradients",
    "strategy/memory": "Memory policies",
    "strategy/edges": "Types of messages, with mode=inference",
    "cluster": "Clusters",
    "engine": "Engines",
    "data": "Data",
    "cost": "Cost models",
    "export": "Engines of others, with mode=export or mode=plan",
    "optimizer": "Optimizers",
    "logger": "Loggers",
    "experiment": "Presets",
    "hparams_search": "Searches, with -m",
    "debug": "To look for mistakes",
}
MODES = {
    "train": "plan, run and measure (the default)",
    "plan": "plan and explain the plan; nothing runs",
    "compare": "plan with several strategies, side by side",
    "max_batch": "the largest micro-batch of several strategies",
    "inference": "answer requests through the pipeline",
    "profile": "what operators, stages, messages and actions take on this machine",
    "export": "write the plan for another engine: export=torch",
    "new": "write a repository for a model and data of your own: path=FOLDER",
}
"""What a run does, in a line each."""

TYPED = "python run.py"
"""What starts the program as these texts have it."""

EXAMPLES = """\
Examples:
  # plan and train the default model on this machine
  python run.py
  # pick parts
  python run.py model=mmt_small strategy=sequential
  # every combination, one table
  python run.py -m strategy=graphpipe,sequential model=mmt_small,digits
  # plan for 32 V100s and explain the plan; no V100 is needed
  python run.py model=mmt cluster=summit_8x4 mode=plan
  # plans of three strategies side by side
  python run.py model=mmt cluster=summit_8x4 mode=compare 'strategies=[graphpipe,sequential,even]'
  # write a repository for a model and data of your own
  python run.py mode=new path=../mine
  # four models x all strategies, with a report
  python run.py -cd sweeps -cn compare_local
"""
PLUGINS = {
    ("hydra/sweeper", "optuna"): "hydra-optuna-sweeper",
    ("hydra/launcher", "joblib"): "hydra-joblib-launcher",
    ("hydra/launcher", "submitit_slurm"): "hydra-submitit-launcher",
}
"""Options of Hydra's own groups, and the packages that have them."""
FAR = 8
"""Words whose lengths differ by more are not compared letter by letter."""
FOLDER_WORDS = ("run_dir", "output_dir", "out_dir", "outdir", "default_root_dir", "project_dir")
"""The folder of a run, in the words of others."""
NAMES = 23
"""Columns of the name of an option in `--help`."""
ALL_SETTINGS = "see python run.py --cfg job for all settings, and --help for all options"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The words that may be written on the command line.

    Args:
        folders: folders that hold groups of options, ours and the user's own.
        config: the plain configuration of the words that are right, made when it is asked for.
    """

    folders: tuple[Path, ...] = (CONF,)
    config: Callable[[], Any] = dict

    @property
    def settings(self) -> list[str]:
        """Dotted names of the settings of the command at hand."""
        return paths(self.config())

    @property
    def defaults(self) -> set[str]:
        """Groups that have a default, so that `GROUP=OPTION` replaces it; any other needs `+GROUP=OPTION`."""
        chosen = self.config().get("hydra", {}).get("runtime", {}).get("choices") or {}
        return {str(key).partition("@")[0] for key in chosen}

    @property
    def groups(self) -> dict[str, list[str]]:
        """Options by group, as in `strategy/weights`."""
        out: dict[str, set[str]] = {}
        for folder in self.folders:
            for path in folder.rglob("*.yaml"):
                if path.parent != folder and path.stem != BASE:
                    out.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
        return {group: sorted(names) for group, names in sorted(out.items())}

    def options(self, group: str) -> list[str]:
        """Names of a group's options; `base` holds the settings that options share and is none of them."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml") if path.stem != BASE})

    def file(self, group: str, name: str) -> Path:
        """The file of an option; the first folder that has one counts."""
        return next(path for folder in self.folders if (path := folder / group / f"{name}.yaml").is_file())

    def unreadable(self) -> str | None:
        """The first file that is no text in UTF-8."""
        for path in (path for folder in self.folders for path in sorted(folder.rglob("*.yaml"))):
            try:
                path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                return str(path)
        return None

    def choose(self, group: str, value: str, known: Sequence[str] = ()) -> str:
        """The fix for an option that a group does not have: the nearest one, and all.

        Args:
            known: the options, where the folders do not tell, as for groups of Hydra's own.
        """
        known = self.options(group) or sorted(known)
        if package := PLUGINS.get((group, value)):
            return f"pip install {package}, which has it"
        elsewhere = (path.parents[1] if "/" not in group else path.parents[2] for path in ROOT.glob(f"sweeps/{group}/{value}.yaml"))
        if folder := next(elsewhere, None):
            return f"add -cd {folder.name}, which has it"
        near = nearest(value, known)
        listed = f"options: {', '.join(known)}" if known else "it has no options"
        return f"write {self.assigned(group, near)} ({listed})" if near else f"choose one; {listed}"

    def assigned(self, group: str, option: str) -> str:
        """The word that chooses an option."""
        return f"{'' if group in self.defaults or group.startswith('hydra/') else '+'}{group}={option}"

    def meant(self, key: str, value: str | None = None) -> str:
        """The fix for a key that is none: the nearest group or setting with its value, or where to look.

        A group counts as nearer where the value is one of its options; so `modle=mmt` means `model`, not `mode`. A setting that is
        a list counts as farther where the value is none; so `devices=3` means `cluster.num_devices`.
        """
        if key in FOLDER_WORDS:
            return f"write hydra.run.dir={brief(value) if value else 'VALUE'}"
        groups, single = self.groups, value is not None and not value.startswith("[")
        section, _, word = key.rpartition(".")
        lists = {name for name in self.settings if single and isinstance(at(self.config(), name), list)}

        def cost(name: str) -> tuple[float, bool, str]:
            tails = [name.replace("/", ".").split(".")[i:] for i in range(1, len(name.replace("/", ".").split(".")))]
            apart = [_distance(key, name)] + [_distance(key.replace("/", "."), ".".join(tail)) + 0.5 for tail in tails]
            # A whole word of a name counts as near, nearer in a name without sections.
            last = re.split(r"[./]", name)[-1]
            near = word in last.split("_") and name.startswith(section)
            part = (0.9 + 0.5 * bool(tails and not section)) if near else len(key)
            fits = 0.6 if value is not None and value in groups.get(name, ()) else 0.0
            return min(*apart, part) - fits + 2.0 * (name in lists), sorted(key) != sorted(name), name

        # A word with + may have made the setting that it names. What Hydra says of the run (`hydra.runtime`) is for nobody to set.
        known = {name for name in (*groups, *self.settings) if name != key or value is None}
        known = {name for name in known if not name.startswith("hydra.runtime.")}
        best = min(known, key=cost, default=None)
        if best is None or cost(best)[0] > max(1.0, 0.4 * len(re.split(r"[./]", key)[-1])):
            group, line = section.replace(".", "/"), re.compile(rf"^{re.escape(word)}:", re.M)
            if has := [option for option in groups.get(group, ()) if line.search(self.file(group, option).read_text("utf-8"))]:
                return f"add {self.assigned(group, min(has, key=len))}, which has it"  # the shortest name is the most general
            beside = [name for name in self.settings if section and name.rpartition(".")[0] == section]
            return f"{section} has {', '.join(beside)}" if beside else ALL_SETTINGS
        if best not in groups:
            return f"write {best}={brief(value) if value else 'VALUE'}"
        if value is None or value in groups[best]:
            return f"write {self.assigned(best, value or groups[best][0])}"
        return self.choose(best, value)


def invocation() -> list[str]:
    """The words that start this program: `python run.py`, or the name of the installed command."""
    name = Path(sys.argv[0]).name
    return ["python", name] if name.endswith(".py") else [name]


def brief(text: str) -> str:
    """A text as it is, or its beginning and its length."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}... ({len(text)} characters)"


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known name with the fewest typing errors between it and `word`, or one that contains it; None where all are far."""
    best = min(known, key=lambda name: (_distance(word, name), sorted(word) != sorted(name), name), default=None)
    if best is not None and _distance(word, best) <= max(1, 0.4 * max(len(word), len(best))):
        return best
    return next((name for name in sorted(known) if len(word) > 2 and word in name), None)


def _distance(a: str, b: str) -> int:
    """Typing errors between two words: letters left out, added, exchanged or swapped with the next (Damerau)."""
    a, b = a.lower(), b.lower()
    if abs(len(a) - len(b)) > FAR:
        return abs(len(a) - len(b))
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        older, before = before, row
        row = [i]
        for j, other in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]


def paths(node: Any, prefix: str = "") -> list[str]:
    """The settings in a plain configuration, as dotted names, with the sections that hold them."""
    out: list[str] = []
    for key, inner in node.items() if isinstance(node, Mapping) else ():
        if not str(key).startswith("_"):
            out += [f"{prefix}{key}", *paths(inner, f"{prefix}{key}.")]
    return out


def at(node: Any, path: str) -> Any:
    """The value at a dotted name of a plain configuration; None where there is nothing."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def help_text(vocabulary: Vocabulary, width: int | None = None) -> str:
    """The text of `--help`: every option with the first line of its file, commands as this one was typed.

    Args:
        width: columns of the terminal, at which what an option is goes on below itself; None leaves an option a line.
    """
    typed = " ".join(invocation())

    def entry(name: str, words: str) -> str:
        words = words.replace(TYPED, typed)
        room = max(width - NAMES - 1, NAMES) if width else len(words) + 1
        lines = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False) or [""]
        return f"  {name:<{NAMES - 3}} " + f"\n{' ' * NAMES}".join(lines)

    lines = [
        "Graph pipeline parallelism: plan, simulate, train and compare branched models.",
        "",
        "usage: python run.py [GROUP=OPTION ...] [KEY=VALUE ...]",
        "       -m: every combination of comma lists",
        "",
        EXAMPLES,
        "Modes (mode=...)",
        *(entry(name, words) for name, words in MODES.items()),
        "",
    ]
    for group, title in GROUPS.items():
        lines.append(f"{title} ({group}=...)")
        for name in vocabulary.options(group):
            # The first comment line of its file that is not Hydra's own.
            said = vocabulary.file(group, name).read_text().splitlines()
            words = next((line.lstrip("# ") for line in said if line.startswith("#") and not line.startswith("# @package")), "")
            lines.append(entry(name, words))
        lines.append("")
    lines += ["Settings: python run.py --cfg job", "Hydra's own help: python run.py --hydra-help"]
    return "\n".join(lines).replace(TYPED, typed)
