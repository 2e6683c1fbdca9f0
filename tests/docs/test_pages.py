"""The pages as a reader walks through them: each is listed, and no link or picture leads nowhere.

`make docs` builds the site and checks more; it needs the extra `docs`, so it is no part of the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT, github_anchor, headings, links, navigation, site_anchor

PAGES = sorted(DOCS.glob("*.md"))


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
            wrong.append(f"{page.name}:{number}: {target}: there is no such file")
        elif page.parent == DOCS and DOCS not in file.parents:
            wrong.append(f"{page.name}:{number}: {target}: the site lacks what is outside docs/")
        elif anchor:
            titles = headings(file)
            for rule in (github_anchor, site_anchor):
                if anchor not in map(rule, titles):
                    wrong.append(f"{page.name}:{number}: {target}: no heading has this anchor by {rule.__name__}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_read_from_elsewhere() -> None:
    """The site asks no other server: no fonts, no scripts, no pictures."""
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
    far = [
        f"{page.name}:{n}: {line}"
        for page in PAGES
        for n, line in enumerate(page.read_text().splitlines(), 1)
        if "](http" in line and "![" in line
    ]
    assert not far
