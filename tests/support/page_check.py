"""A strict reader of pages."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Every element is closed in order; nothing is loaded, and nothing refers to another host."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("link", "iframe", "img") and "src" not in dict(attrs), (tag, attrs)
        for name, value in attrs:
            if name == "href":
                assert not (value or "").startswith(("http:", "https:", "//")), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def parse(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker
