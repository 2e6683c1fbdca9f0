"""What each mechanism has outside its folder: files of the core that name it, and hooks of the core that are there for it.

    python -m tests.mechanisms.touched

A hook is a method that a class of the mechanism overrides, of an abstract class of the core. One that no other mechanism
overrides is the mechanism's own part of the core; the others are there for all. Of `split_backward`, the ten schedules are not
counted: a schedule is a file beside those of the core.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from gpp.mechanism import packages
from tests.support.pages import ROOT
from tests.support.sources import said

WORDS: Final = {
    "helpers": r"weight_device|input_share|\bhelpers?\b|\bhelped\b",
    "marks": r"recomput|[Oo]ffload|planner\.marks|marks: ClassVar",
    "precision": r"[Aa]utocast|[Ll]oss[ _]?[Ss]cale|LossScale|overflowed",
    "quantised_edges": r"[Qq]uantis|edge_(bits|clip|auto)|(most|useful)_bits",
    "round_robin": r"[Rr]ound[ _-]?[Rr]obin|1F1B-RR|replicas( that)? take (turns|whole)",
    "serving": (r"\bserv(es|ed|ing)\b|Serving|Serve[A-Z]|\brequests\b|\bArrivals\b|arrival_rate|inference\"|=inference|EdgePipe"),
    "shared_state": r"ZeRO\b|optimizer\.shard|\bshard:|shares?_state|state_share|[Ss]hare[sd]? (the|their) (optimizer's )?state",
    "split_backward": (
        r"split_backward|INPUT_GRADIENTS|WEIGHT_GRADIENTS|HALVES|split(s|ting)? (a |the |their )?backwards?\b"
        r"|backwards?( that)? (is|are|be) split|hal(f|ves) of (a|the|its|their) backwards?"
    ),
    "tensor_parallel": r"[Tt]ensor[ _-]parallel",
    "weight_versions": (
        r"\b_?stash|[Dd]ouble_?[Bb]uffer|[Ss]pec_?[Tt]rain|[Pp]ipe_?[Mm]are|[Pp]ipe_?[Oo]ptim|[Vv]ertical_?[Ss]ync|\b[Nn]aive\b"
        r"|[Pp]redictor|[Pp]redict(s|ed|ing)? (the )?weights|weights?[/._]correction|\b[Cc]orrections?\b"
    ),
}
"""By mechanism: the words of its settings and fields, and what its papers call things."""


@cache
def core() -> dict[str, str]:
    """The texts of the core by path below gpp/: without mechanisms and the list of public names, where a user finds theirs."""
    files = sorted((ROOT / "gpp").rglob("*.py"))
    texts = {str(path.relative_to(ROOT / "gpp")): path.read_text() for path in files}
    return {name: text for name, text in texts.items() if not name.startswith("mechanisms/") and name != "__init__.py"}


def naming(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """By mechanism: the files that have its words. A server of pages has requests of its own."""
    found = {name: {file for file, text in texts.items() if re.search(words, text)} for name, words in WORDS.items()}
    found["serving"] -= {file for file in texts if file.startswith("ui/")}
    return found


def hooks() -> dict[str, dict[str, set[str]]]:
    """By mechanism: the abstract classes of the core that it implements, and their own bases, with the methods overridden."""
    classes = {node.name: node for name in core() for node in said(ROOT / "gpp" / name).classes}
    out: dict[str, dict[str, set[str]]] = {}
    for package in packages():
        mine = out.setdefault(package.rpartition(".")[2], defaultdict(set))
        for path in (ROOT / Path(*package.split("."))).rglob("*.py"):
            for node in said(path).classes:
                for base in abstract(node, classes):
                    mine[base] |= methods(node) & methods(classes[base])
    return out


SHIPPED: Final = {"AbstractPlanner", "AbstractChainPlanner", "AbstractSchedule", "AbstractExporter", "AbstractModel"}
"""What a user chooses by name: an option of a mechanism is a file beside those of the core, and asks nothing of the core."""


def abstract(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """The names of the abstract classes among `classes` that a class derives from, but for those of `SHIPPED`."""
    for name in (ast.unparse(base).partition("[")[0] for base in node.bases):
        if name.startswith("Abstract") and name not in SHIPPED and name in classes:
            yield name
            yield from abstract(classes[name], classes)


def methods(node: ast.ClassDef) -> set[str]:
    """The names of a class's methods, constructors left out, and of fields that stand in for one."""
    named = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"}
    return named | {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}


def main() -> None:
    """Print the table."""
    named, every = naming(core()), hooks()
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, bases in every.items():
        for base, found in bases.items():
            for method in found:
                users[base, method].add(name)
    print("| mechanism | files, lines of its folder | files and rooms of the core that name it | hooks | for it alone |")
    print("|---|---|---|---|---|")
    for name, bases in every.items():
        files = [path.read_text().count("\n") for path in (ROOT / "gpp" / "mechanisms" / name).rglob("*.py")]
        rooms = {file.partition("/")[0] for file in named[name]}
        alone = sorted(f"{base}.{method}" for (base, method), who in users.items() if who == {name})
        count = sum(map(len, bases.values()))
        print(f"| {name} | {len(files)}, {sum(files)} | {len(named[name])}, {len(rooms)} | {count} | {len(alone)} |")
    for name in every:
        alone = sorted(f"{base}.{method}" for (base, method), who in users.items() if who == {name})
        print(f"\n{name}: named by {', '.join(sorted(named[name])) or 'no file'}\n  alone: {', '.join(alone) or 'no hook'}")


if __name__ == "__main__":
    main()
