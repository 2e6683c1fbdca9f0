"""Every text of a page can be read on its ground, on light pages and dark ones."""

import re
from typing import get_args

import pytest

from gpp.program.kinds import KINDS
from gpp.report.draw import palette
from gpp.report.draw.page import TEMPLATES, page_script
from gpp.report.draw.palette import FILLS, GROUNDS, STATUS, TEXTS, TOKENS, contrast, tokens_css, tone, value
from gpp.report.draw.timelines import colour
from gpp.timeline import Event


def test_contrast_of_black_on_white_and_of_grey() -> None:
    """The figures of WCAG's own examples."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_on_every_ground_and_fill(mode: palette.Mode) -> None:
    def read(name: str) -> str:
        return getattr(TOKENS[name], mode)

    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
    pairs += [(f"{status}-ink", status) for status in STATUS if not status.endswith("-ink")]
    pairs += [("page", "ink")]  # the box of numbers
    assert {pair: contrast(*map(read, pair)) for pair in pairs if contrast(*map(read, pair)) < 4.5} == {}
    for fill in FILLS:
        assert contrast(value(palette.text_on(palette.token(fill)), mode), read(fill)) >= 4.5, fill


@pytest.mark.parametrize("branch", [None, *range(16)])
def test_the_script_writes_on_blocks_in_the_colour_that_python_computes(branch: int | None) -> None:
    """paint.js names the token of the text by the shade; here it follows from contrast."""
    for kind in KINDS:
        fill, ink = colour(Event(0, kind, 0, 0, 0.0, 1.0), tone(branch))
        name = fill.removesuffix(")").rpartition("-")[2]
        if name in get_args(palette.Shade):
            assert ink == f"var(--on-{name})"


def test_sixteen_branches_look_different() -> None:
    assert len({(tone(b).soft, tone(b).hatched) for b in range(16)}) == 16


def test_every_token_that_is_used_is_defined_for_both_modes() -> None:
    css = tokens_css()
    assert css.count("--ink:") == 3  # light, dark by the system, dark by the button
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", (TEMPLATES / "style.css").read_text()))
    used |= set(re.findall(r'token\("([a-z0-9-]+)"\)', page_script())) | set(re.findall(r'fill: "([a-z0-9-]+)"', page_script()))
    assert used <= set(TOKENS) and {"ink", "hatch", "muted"} <= used
