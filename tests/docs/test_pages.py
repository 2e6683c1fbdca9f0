"""The pages as a reader walks through them: each is listed, no link leads nowhere, and the words are those of the program.

`make docs` builds the site and checks more; it needs the extra `docs`, so it is no part of the tests.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT, github_anchor, headings, links, navigation, site_anchor

PAGES = sorted(DOCS.glob("*.md"))
STUMBLING = (
    "a line a stage",
    "say why; needs none",
    "told once",
    "what lacks is",
    "a loss in which samples meet",
    "passes words on",
    "passes other words on",
    "too many partitions to list",
    "dynamic program over bottlenecks",
    "for want of memory",
)
"""Phrases over which readers have stumbled; neither pages nor messages nor help texts have them again."""


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    """On GitHub and on the site, which have two rules for anchors; and the site has the files of docs/ alone."""
    wrong = []
    for number, target in links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{page.name}, link {number}: {target}: there is no such file")
        elif page.parent == DOCS and DOCS not in file.parents:
            wrong.append(f"{page.name}, link {number}: {target}: the site has the files of docs/ alone")
        elif anchor:
            wrong += [
                f"{page.name}, link {number}: {target}: no heading has this anchor by {rule.__name__}"
                for rule in (github_anchor, site_anchor)
                if anchor not in map(rule, headings(file))
            ]
    assert not wrong, "\n".join(wrong)


def test_the_python_interface_lists_every_public_name_at_its_home() -> None:
    import gpp

    listed = re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert {name: home for home, name in listed} == gpp._HOME


def test_nothing_is_fetched_from_elsewhere() -> None:
    """The site asks no other server: no fonts, no scripts, no pictures."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "://" not in settings
    for page in (*PAGES, *DOCS.glob("*.css")):
        assert not re.search(r"!\[[^]]*\]\(https?:|<script|url\(|src=\"https?:", page.read_text()), page.name


@cache
def sources() -> str:
    """The text of the program, its settings and its pages, without line breaks inside a message."""
    files = [*(ROOT / "gpp").rglob("*.py"), *(ROOT / "baselines").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    return "\n".join(file.read_text() for file in files)


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    """A message that the program words in another way is found no more by who looks for it."""
    pages = (DOCS / "troubleshooting.md", DOCS / "troubleshooting_runs.md")
    quoted = [part for page in pages for heading in headings(page) for part in re.findall(r"`([^`]+)`", heading)]
    assert len(quoted) > 35
    assert not [part for part in quoted if part not in sources()]


def test_the_pages_of_users_stay_short() -> None:
    """As `wc -w docs/*.md README.md` counts; what only builders need goes to the diary."""
    counted = {
        page.name: len(page.read_text().split()) for page in (ROOT / "README.md", *DOCS.rglob("*.md")) if page.parent.name != "log"
    }
    assert sum(counted.values()) <= 25_000, counted
    del counted["figures.md"]  # as long as there are headlines
    assert not {name: words for name, words in counted.items() if words > 1_200}


def test_the_diary_has_dates_and_outcomes_newest_first() -> None:
    """Each file is named by its date, has the date and an outcome as its only main heading, and is listed once."""
    log = DOCS / "log"
    listed = re.findall(r"^\* \[(.+)\]\((\S+)\)$", (log / "README.md").read_text(), re.M)
    days = [name[:10] for _, name in listed]
    assert days == sorted(days, reverse=True)
    assert sorted(name for _, name in listed) == sorted(path.name for path in log.iterdir() if path.name != "README.md")
    for heading, name in listed:
        assert (log / name).read_text().startswith(f"# {heading}\n"), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", name) and heading.startswith(f"{name[:10]} "), name
        assert len(heading.split()) > 4, f"{name}: the heading states no outcome"


def test_phrases_that_stumble_stay_away() -> None:
    text = "\n".join([sources(), *(page.read_text() for page in (*PAGES, ROOT / "README.md"))])
    flat = re.sub(r"\s+", " ", text).lower()
    assert not [phrase for phrase in STUMBLING if phrase in flat]
