"""Compiled files do what they say in plain Python, and one that has changed since is left aside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpp import compiled, cost, graph, simulate
from gpp.planners import search
from gpp.simulate import longest_path
from tests.support.long import thinned
from tests.support.twins import compare, plain, plainly


@pytest.mark.parametrize("seed", thinned(range(1, 9), 4))
def test_plain_python_does_the_same(seed: int) -> None:
    """Programs, predictions, steps and walks: every time and every draw. `tests.checks.compiled` asks 10,000 programs."""
    found = compare(seed, 12)
    assert all(part.count for part in found.values())


def test_plain_python_stands_in_for_all_that_is_compiled() -> None:
    """The classes that are compared are two."""
    for module in plain().values():
        assert (module.__file__ or "").endswith(".py")
    compiled_walk = longest_path.Walk
    with plainly():
        assert longest_path.Walk is plain()["gpp.simulate.walk"].Walk is not compiled_walk
        assert plain()["gpp.planners.search.memory"].Together is plain()["gpp.cost.together"].Together
    assert longest_path.Walk is compiled_walk


def test_a_step_beyond_the_slots_is_refused() -> None:
    """Compiled code would write behind an array's end."""
    for walk in (longest_path.Walk, plain()["gpp.simulate.walk"].Walk):
        made = walk([(0, 1, [(3, 0, 1.0, 0.0, (5,))])])
        with pytest.raises(IndexError, match="5 slots and 1 nodes, and steps have 6 and 1"):
            made.go(compiled.reals(5), compiled.reals(1))
        with pytest.raises(IndexError, match="slot -2 of a step is below 0"):
            walk([(0, 1, [(3, 0, 1.0, 0.0, (-2,))])])


def test_what_is_compiled_is_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has changed since, and a build without a compiler, leave the plain Python."""
    names = compiled.names()
    assert {name.rpartition(".")[0] for name in names} == {package.__name__ for package in (cost, graph, search, simulate)}
    assert len({name.rpartition(".")[2] for name in names}) == len(names), "a library has one way in for each last name"
    for name in names:
        for kind in ("py", "pxd"):
            path = Path(*name.split(".")).with_suffix(f".{kind}")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(compiled.GPP.parent / path, tmp_path / path)
    monkeypatch.setattr(compiled, "GPP", tmp_path / "gpp")
    assert compiled.known() == {}
    digests = {name: compiled.digest(name) for name in names}
    (tmp_path / "gpp" / "compiled.json").write_text(json.dumps(digests))
    assert compiled.known() == {}, "another Python has compiled them"
    (tmp_path / "gpp" / compiled.LIBRARY).touch()
    assert compiled.known() == digests
    with (tmp_path / "gpp" / "simulate" / "walk.pxd").open("a") as file:
        file.write("\n")
    assert compiled.known() == {}
    (tmp_path / "gpp" / "compiled.json").write_text("[]")
    assert compiled.known() == {}


def test_stale_compiled_files_are_not_mixed_with_plain_ones() -> None:
    """A plain file that imports another gets the plain one, though a compiled one lies beside it."""
    code = (
        "from gpp import compiled; compiled.KNOWN.clear()\n"
        "from gpp.planners.search import climb, memory\n"
        "assert climb.__file__.endswith('.py') and memory.__file__.endswith('.py')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
