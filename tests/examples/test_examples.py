"""Every example runs to its end by itself, and does what it says."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.pages import ROOT

FOLDER = ROOT / "examples"
RUN = {
    "own_loop.py": r"accuracy 9\d\.\d% on digits that it has not seen",
    "vision_language.py": r"loss 4\.\d+ at the first step, [0-3]\.\d+ at step 30; the encoder is as it was",
    "hf_trainer.py": r"loss 4\.\d+ at the first step, 3\.\d+ at step 20; the model has the trained weights",
    "recommender.py": r"[789]\d% of the clicks",
    "plan_only.py": r"as a graph a step takes [1-9]\d?% less than as the best chain",
    "to_torchtitan.py": r"torchrun --nproc-per-node 4 -m torchtitan.train",
    "sweep.py": r"(?s)strategy.*graphpipe.*even",
}
"""File -> what it prints."""
NEEDS = {"vision_language.py": ("transformers",), "hf_trainer.py": ("transformers", "accelerate")}


def html_of(value: object) -> str:
    return value._repr_html_()  # type: ignore[attr-defined]


def test_every_example_is_listed_and_tried() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == {*RUN, "tiny_gpp.py", "plan_explore.ipynb"}
    listed = re.findall(r"^\| \[(\S+)\]\((\S+)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in listed} == files and all(name == link for name, link in listed)
    for name in RUN:
        assert ast.get_docstring(ast.parse((FOLDER / name).read_text())), name


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("name", RUN)
def test_it_runs(name: str, tmp_path: Path) -> None:
    for needed in NEEDS.get(name, ()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{name} needs {needed}")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, FOLDER / name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(RUN[name], done.stdout), done.stdout
    assert "FutureWarning" not in done.stderr


@pytest.mark.long
def test_the_notebook_draws_plans_and_timelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    book = json.loads((FOLDER / "plan_explore.ipynb").read_text())
    names: dict[str, object] = {}
    shown = list[object]()
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in book["cells"]:
            if cell["cell_type"] != "code":
                continue
            body = ast.parse("".join(cell["source"])).body
            shows = body[-1]
            last = shows if isinstance(shows, ast.Expr) else None
            body = body[:-1] if last else body
            exec(compile(ast.Module(body, []), "plan_explore.ipynb", "exec"), names)
            if last is not None:
                shown.append(eval(compile(ast.Expression(last.value), "plan_explore.ipynb", "eval"), names))
    plan, step, chain, of_chain, sizes = shown
    for drawn in (plan, chain):
        svg = html_of(drawn)
        root = ElementTree.fromstring(svg[svg.index("<svg") :])
        boxes = root.findall("{http://www.w3.org/2000/svg}rect")
        assert len(boxes) == len(drawn.stages)  # type: ignore[attr-defined]
        columns = {box.get("x") for box in boxes}
        assert len(columns) == drawn.depth  # type: ignore[attr-defined]
    for drawn in (step, of_chain):
        root = ElementTree.fromstring(html_of(drawn))
        bars = root.findall("{http://www.w3.org/2000/svg}rect")
        edges = [(float(bar.get("x") or 0), float(bar.get("width") or 0)) for bar in bars]
        assert len(bars) >= 4 * 8 * 2 and max(x + width for x, width in edges) <= 881 and min(x for x, _ in edges) >= 64
    assert step.metrics.iteration_s < of_chain.metrics.iteration_s  # type: ignore[attr-defined]
    assert list(sizes) == [4, 16]  # type: ignore[call-overload]
