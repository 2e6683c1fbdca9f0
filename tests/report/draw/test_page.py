import subprocess
import sys

import jinja2
import pytest

from gpp.report.draw.page import Cell, Column, PageTable, render
from gpp.report.draw.svg import Drawing
from tests.support.page_check import parse

PAGE = {
    "title": "<t>",
    "facts": [("jobs", 1)],
    "figures": (),
    "bars": (),
    "wide_bars": False,
    "scaling": (),
    "medians": PageTable(columns=[Column(name="a & b", kind="n")], rows=[["<b>"], [Drawing("<svg></svg>")]]),
    "jobs": PageTable(columns=[Column(name="job")], rows=[[Cell(text="<i>", link='x"y')], [Cell(text="why", more="<u>")]]),
    "files": [("a.json", "")],
}


def test_words_are_escaped_and_drawings_are_not() -> None:
    page = render("sweep.html", **PAGE)
    assert {"<t>", "<b>", "<i>", "<u>", "a & b"} <= set(parse(page).words)
    assert '<td class="n"><svg></svg></td>' in page and 'href="x&#34;y"' in page
    assert "Iteration time" not in page  # a section without content is not there


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="files"):
        render("sweep.html", **{key: value for key, value in PAGE.items() if key != "files"})


def test_templates_are_loaded_with_the_first_page() -> None:
    code = "import sys, gpp.app.recording, gpp.report.sweep.files; print('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
