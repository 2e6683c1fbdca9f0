"""What a repository has beside its code: each file says what is true of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {r.name: r for r in map(Requirement, (ROOT / "constraints.txt").read_text().split("\n")[:-1])}


def required(extra: str | None = None) -> list[Requirement]:
    project = PROJECT["project"]
    return [Requirement(text) for text in (project["optional-dependencies"][extra] if extra else project["dependencies"])]


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [requirement for extra in (None, *extras) for requirement in required(extra) if requirement.name != "gpp"]
    assert {requirement.name for requirement in wanted} <= set(PINS)
    for requirement in wanted:
        (pin,) = PINS[requirement.name].specifier
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), requirement


def test_all_names_every_extra_of_users() -> None:
    (everything,) = required("all")
    builders = {"all", "test", "dev", "docs"}
    assert everything.extras == set(PROJECT["project"]["optional-dependencies"]) - builders


def test_the_lock_has_the_pins_with_hashes() -> None:
    """`make lock` makes it again. A pin that changed without it would install something else here and there."""
    text = (ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^ \\;]+)", text, re.M))
    assert locked and len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) >= len(locked)
    (pins,) = ({name: next(iter(pin.specifier)).version for name, pin in PINS.items()},)
    assert {name: version for name, version in locked.items() if name in pins and version != pins[name]} == {}
    assert {r.name for r in required()} <= set(locked)
    assert "://" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    commands = "\n".join(step["run"] for job in jobs.values() for step in job["steps"] if "run" in step)
    assert set(re.findall(r"\bmake (\w+)", commands)) <= targets
    assert commands


def test_every_python_and_both_ends_of_torch_are_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    runs = jobs["test"]["strategy"]["matrix"]["include"]
    lowest, below = re.findall(r"[\d.]+", PROJECT["project"]["requires-python"])
    minors = range(int(lowest.split(".")[1]), int(below.split(".")[1]))
    assert {run["python"] for run in runs} == {f"3.{minor}" for minor in minors}
    (torch,) = (requirement for requirement in required() if requirement.name == "torch")
    ends = [run["torch"] for run in runs if run["torch"]]
    assert all(torch.specifier.contains(version) for version in ends)
    major, minor = map(int, max(ends).split(".")[:2])
    assert not torch.specifier.contains(f"{major}.{minor + 1}.0"), "the newest torch of the range is not tested"
    low, high = (int(version.split(".")[1]) for version in (min(ends), max(ends)))
    assert not torch.specifier.contains(f"{major}.{low - 1}.0") and high > low


def test_fragments_of_the_change_log() -> None:
    types = {entry["directory"] for entry in PROJECT["tool"]["towncrier"]["type"]}
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert fragments
    for path in fragments:
        assert re.fullmatch(rf"(\+[\w-]+|\d+)\.({'|'.join(types)})\.md", path.name), path.name
        assert path.read_text().strip().endswith((".", ")"))


def test_the_wheel_is_typed_and_has_its_data() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    assert data["gpp"] == ["py.typed"] and (ROOT / "gpp" / "py.typed").exists()
    for package, patterns in data.items():
        folder = ROOT / package.replace(".", "/") if package != "*" else ROOT / "gpp" / "simulate"
        for pattern in patterns:
            assert pattern == "compiled.json" or any(folder.glob(pattern)), (package, pattern)


def test_the_files_for_people_lead_somewhere() -> None:
    for name in ("CONTRIBUTING.md", "SECURITY.md", "changes/README.md"):
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / name).parent / target).exists(), (name, target)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make (\w+)", (ROOT / "CONTRIBUTING.md").read_text())) <= targets
