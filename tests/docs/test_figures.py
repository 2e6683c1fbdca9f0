"""docs/figures.md is what its data says, and the data is what commands of today wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeps import figures
from sweeps.figures import DATA, PAGE, entry, folder, kept, page, section, words
from sweeps.headlines import HEADLINES
from sweeps.readings import Number, card, found_in, guesses, layerpipe, planning
from tests.checks.planning_speed import Cost, Point, line
from tests.support.documented import documented, prepare, unknown_words
from tests.support.pages import ROOT

TRUTH = """
p40_8: 0.98 of the peak, 0.44 of the memory's bandwidth, 8 us a kernel, 1 of a link's in an all-reduce

| model | layout; micro-batches | measured | published | predicted | error | |
|---|---|---|---|---|---|---|
| ResNet-101 | 1 device; 1 x 118 | samples/s | 100 | 101 | +1.0% | fitted to |
| ResNet-101 | pp 2; 1667 x 15, recomputed but the last | samples/s | 160 | 200 | +25.0% |  |
| ResNet-101 | pp 4; 256 x 22, recomputed but the last | samples/s | 320 | 288 | -10.0% |  |

| guess | rows | median error | largest | Kendall's tau |
|---|---|---|---|---|
| no fit | 112 | 10.4% | 55.0% | 0.941 |
"""


def test_the_page_is_that_of_its_data() -> None:
    """Whoever changes a number by hand, or a headline without its page, finds it here; `--page` writes it again."""
    assert PAGE.read_text() == page(kept())
    assert {headline.name for headline in HEADLINES} >= set(json.loads(DATA.read_text())), "a number that no headline names"


def test_each_number_is_of_the_command_above_it() -> None:
    for headline in HEADLINES:
        found = kept().get(headline.name)
        assert found is None or tuple(found["commands"]) == headline.commands, f"{headline.name} is to be run again"
        assert found is None or (found["numbers"] and found["commit"] and found["date"] and found["machine"])


def test_the_commands_are_known(tmp_path: Path) -> None:
    """By the same look at every word as of the commands of all pages."""
    prepare(tmp_path)
    on_page = {command.text: command for command in documented()}
    for command in (command for headline in HEADLINES for command in headline.commands):
        assert not unknown_words(on_page[command], tmp_path), command


def test_the_readme_has_the_numbers_of_its_command() -> None:
    """README's command is that of a headline, and the numbers beside it are those that the headline has kept."""
    text = " ".join((ROOT / "README.md").read_text().split())
    (readme,) = (headline for headline in HEADLINES if headline.name == "readme")
    graph, chain, bound = (f"{number['value']:.0f} ms" for number in kept()["readme"]["numbers"])
    assert readme.commands[0] in text
    assert f"predicts {graph} a step for a graph of stages, {chain} for the best chain" in text
    assert f"no plan is below {bound}" in text


def test_a_headline_is_run_where_nobody_else_writes() -> None:
    """A sweep's results of before are never taken for those of today."""
    (memory,) = (headline for headline in HEADLINES if headline.name == "memory")
    first, second = (words(memory, command) for command in memory.commands)
    assert first[-1] == f"hydra.sweep.dir={folder(memory)}" and second[-1] == str(folder(memory))
    assert folder(memory) == ROOT / "outputs" / "figures" / "memory"


def test_what_was_not_run_has_no_number() -> None:
    text = section(HEADLINES[0], None, "")
    assert "Not yet measured." in text and "*" not in text


def test_a_section_has_numbers_yardsticks_and_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "commit", lambda: "1234abcd")
    numbers = [
        Number("error", 0.0049, "%", 0.001, 0.25, "a guess: 30 %"),
        Number("gain", 1.238, "times as fast"),
        Number("loss", 4e-16),
    ]
    text = section(HEADLINES[0], entry(HEADLINES[0], numbers, 61.2, "2 cores, load 1.0"), "2 cores")
    assert "* error: **0.49% (0.10% to 25.0%)**; a guess: 30 %\n" in text
    assert "* gain: **1.24 times as fast**\n* loss: **4.0e-16**\n" in text
    assert ", 1234abcd, 61 s, load 1.0.\n" in text
    elsewhere = section(HEADLINES[0], entry(HEADLINES[0], numbers, 61.2, "4 cores, load 1.0"), "")
    assert ", 1234abcd, 61 s, 4 cores, load 1.0.\n" in elsewhere


def test_published_speeds_are_read_with_a_guess_that_has_no_skill() -> None:
    error = card(TRUTH, "p40_8", "P40")
    assert error.what == "P40, error of 2 speeds" and (error.low, error.high) == (pytest.approx(0.1), pytest.approx(0.25))
    assert error.beside == "tau 1.000; scaled with the devices 25.0%, at most 25%"  # 200 for 160, 400 for 320
    (plain,) = guesses(TRUTH, "no fit")
    assert (plain.value, plain.high, plain.beside) == (0.104, 0.55, "tau 0.941")
    with pytest.raises(ValueError, match="has no"):
        found_in(TRUTH, r"median of (\d+)")


def test_a_sweeps_figure_is_read_by_its_series(tmp_path: Path) -> None:
    points = [
        {"panel": "vgg16", "series": series, "x": x, "ours": ours, "published": None, "status": "ok"}
        for x, of in (("2", {"PipeDream": 1.0, "neighbour": 1.1}), ("3", {"PipeDream": 1.0, "neighbour": 1.3}))
        for series, ours in of.items()
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"figures": [{"points": points}]}))
    (only,) = layerpipe("", tmp_path)
    assert (only.what, only.value, only.low, only.high) == ("neighbour", pytest.approx(1.2), 1.1, 1.3)


def test_planning_is_what_its_check_prints_of_plans() -> None:
    cost = Cost(
        seconds={"graph": 0.06, "plan": 9.5, "bound": 1.25},
        peak_bytes={"plan": 10**8, "bound": 10**8},
        iteration_s=0.5,
        bound_s=0.4,
        num_ops=1000,
        num_devices=1024,
    )
    printed = f"{line(Point(name='large dag', words=()), cost, None)}\n1 points, 0 over a limit\n"
    assert planning(printed, Path()) == [Number("dag, 1000 x 1024", 9.5, "CPU s", beside="the bound 1.25")]
